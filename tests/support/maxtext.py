"""Where MaxText's own formula is known to leave something out.

docs/differences_from_maxtext.md says what: in the weights, in the attention, or, of olmo3's
windows, in the attention of long sequences only.
"""

WRONG_WEIGHTS = {
    *("deepseek-custom", "deepseek3.2-671b", "deepseek4-284b", "deepseek4-tiny"),
    *("envy-switch-base", "envy-switch-large", "envy-switch-xxl", "envy-test"),
    *("qwen3-next-80b-a3b", "qwen3.5-35b-a3b", "qwen3.5-397b-a17b"),
}
WRONG_WHEN_LONG = {"olmo3-32b", "olmo3-7b", "olmo3-7b-pt"}
WRONG = WRONG_WEIGHTS | WRONG_WHEN_LONG
