"""Words of a command line: names, keys and flags, and what is said of unknown ones."""

from __future__ import annotations

import pytest

from mfu_jax.errors import UserError
from mfu_jax.util.arguments import parse


def test_words_are_sorted_into_names_keys_and_flags() -> None:
    arguments = parse(["llama3-8b", "--mfu=41%", "steps =2", "--json"], flags=["--json"])
    assert arguments.names == ("llama3-8b",)
    assert arguments.pairs == (("mfu", "41%"), ("steps", "2"))
    assert arguments.flags == {"--json"}


def test_of_a_key_given_twice_the_last_value_counts() -> None:
    arguments = parse(["steps=1", "steps=2"])
    assert arguments.values == {"steps": "2"}
    assert len(arguments.pairs) == 2


def test_text_after_the_first_equals_sign_is_kept() -> None:
    assert parse(["model_config=llama3-8b steps=2"]).values == {"model_config": "llama3-8b steps=2"}


def test_a_key_without_its_equals_sign_is_shown_with_one_where_any_key_may_be_meant() -> None:
    with pytest.raises(UserError) as error:
        parse(["--steps", "5"])
    assert str(error.value) == (
        "unknown flag '--steps'; expected --steps=…, with an equals sign or --help"
    )


def test_a_single_dash_is_a_name_because_it_stands_for_stdin() -> None:
    assert parse(["-"], flags=["--json"]).names == ("-",)


def test_a_path_with_an_equals_sign_is_a_name() -> None:
    arguments = parse(["runs/lr=0.1/step.hlo.xz", "./a=b", "model=x/y=z"], keys=["model"])
    assert arguments.names == ("runs/lr=0.1/step.hlo.xz", "./a=b")
    assert arguments.values == {"model": "x/y=z"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tokns=1"], "unknown key 'tokns'; did you mean 'tokens'?; expected tokens or chips"),
        (["--jsno"], "unknown flag '--jsno'; did you mean '--json'?; expected --json or --help"),
        (["--tokens"], "--tokens has no value; expected --tokens=…, with an equals sign"),
        (["--json=1"], "--json takes no value; expected --json alone, got '--json=1'"),
    ],
)
def test_an_unknown_word_is_named_with_what_was_expected(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(words, keys=("tokens", "chips"), flags=("--json",))
    assert str(error.value) == message


def test_a_long_list_of_keys_is_not_printed() -> None:
    with pytest.raises(UserError, match=r"^unknown key 'k'$"):
        parse(["k=1"], keys=[f"long_field_name_{i}" for i in range(100)])


def test_a_command_without_keys_says_so() -> None:
    with pytest.raises(UserError, match="no key=value is expected here"):
        parse(["k=1"], keys=())


@pytest.mark.parametrize(("words", "got"), [([], "none"), (["a", "b"], "a b")])
def test_one_name_is_exactly_one(words: list[str], got: str) -> None:
    with pytest.raises(UserError, match=f"^expected one file, got {got}$"):
        parse(words).one_name("file")


def test_an_option_takes_the_next_word_or_what_follows_its_equals_sign() -> None:
    for words in (["--junit", "a.xml"], ["--junit=a.xml"]):
        arguments = parse(["run", *words], keys=("junit",), options=("--junit",))
        assert arguments.names == ("run",)
        assert arguments.values == {"junit": "a.xml"}
    for words in (["--junit"], ["--junit", "--json"]):
        with pytest.raises(UserError, match="--junit has no value; expected --junit VALUE or"):
            parse(words, options=("--junit",), flags=("--json",))


def test_a_flag_may_have_a_value() -> None:
    assert parse(["--html"], flags=("--html=",)).flags == {"--html"}
    arguments = parse(["--html=a.html"], flags=("--html=",))
    assert (arguments.flags, arguments.values) == (frozenset(), {"html": "a.html"})
