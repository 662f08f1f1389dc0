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


def test_a_value_stands_after_an_equals_sign_or_is_the_next_word() -> None:
    for keys in (None, ("junit",)):
        for words in (["--junit", "a.xml"], ["--junit=a.xml"], ["junit=a.xml"]):
            arguments = parse(["run", *words], keys=keys)
            assert arguments.names == ("run",)
            assert arguments.values == {"junit": "a.xml"}
        for words in (["--junit"], ["--junit", "--json"]):
            with pytest.raises(UserError, match="--junit has no value; expected --junit VALUE or"):
                parse(words, keys=keys, flags=("--json",) if keys else ())
    assert parse(["--profile", "runs/lr=0.1/trace"]).values == {"profile": "runs/lr=0.1/trace"}
    assert parse(["--baseline", "-"]).values == {"baseline": "-"}


def test_where_any_key_may_be_meant_a_misspelt_flag_at_the_end_is_still_seen() -> None:
    with pytest.raises(UserError) as error:
        parse(["a.hlo", "--jsno"], flags=("--json",))
    assert str(error.value) == (
        "unknown flag '--jsno'; expected --json or --help\nhint: did you mean '--json'?"
    )


@pytest.mark.parametrize(
    ("key", "keys", "means"),
    [
        ("model", ("model", "dtype"), "model"),
        ("model_name", ("model", "dtype"), "model"),
        ("model", ("model_name", "steps"), "model_name"),
    ],
)
def test_a_synonym_means_the_key_of_the_command(key: str, keys: tuple[str], means: str) -> None:
    assert parse([f"{key}=7"], keys=keys).values == {means: "7"}
    assert parse([f"{key}=7"]).checked(keys).values == {means: "7"}


def test_a_single_dash_is_a_name_because_it_stands_for_stdin() -> None:
    assert parse(["-"], flags=["--json"]).names == ("-",)


def test_a_path_with_an_equals_sign_is_a_name() -> None:
    arguments = parse(["runs/lr=0.1/step.hlo.xz", "./a=b", "model=x/y=z"], keys=["model"])
    assert arguments.names == ("runs/lr=0.1/step.hlo.xz", "./a=b")
    assert arguments.values == {"model": "x/y=z"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["tokns=1"],
            "unknown key 'tokns'; expected tokens or chips\nhint: did you mean 'tokens'?",
        ),
        (
            ["--jsno"],
            "unknown flag '--jsno'; expected --json or --help\nhint: did you mean '--json'?",
        ),
        (["--tokens"], "--tokens has no value; expected --tokens VALUE or --tokens=VALUE"),
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


@pytest.mark.parametrize("keys", [None, ()])
def test_a_page_may_have_a_name(keys: tuple[str, ...] | None) -> None:
    for words, page in [
        (["--html"], ""),
        (["--html=a.html"], "a.html"),
        (["html=a.html"], "a.html"),
        (["--html", "a.html"], "a.html"),
        (["--html", "--json"], ""),
    ]:
        arguments = parse(["run", *words], keys=keys, flags=("--html", "--json"))
        assert arguments.names == ("run",)
        assert arguments.values == {"html": page}
        assert "--html" not in arguments.flags
    assert parse(["run"], keys=keys, flags=("--html",)).values == {}
    for words in (["a.html"], ["--html", "a.html", "b.htm"], ["--html=a.html", "b.html"]):
        with pytest.raises(UserError, match="expected a page once, after --html"):
            parse(words, keys=keys, flags=("--html",))
