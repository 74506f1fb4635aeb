"""YAML as the configuration reads it: plain data with lines, and every fault said at its line."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config import yaml_source
from extproc.config.problem import ConfigError
from extproc.config.yaml_source import read, read_file


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, "f.yaml")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n", "~", "{}"])
def test_a_file_without_content_is_an_empty_mapping(text: str) -> None:
    assert read(text, "f.yaml").data == {}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True),
        ("False", False),
        ("on", "on"),
        ("yes", "yes"),
        ("n", "n"),
        ("12", 12),
        ("-3", -3),
        ("0x1F", 31),
        ("010", "010"),
        ("1_000", "1_000"),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1:30", "1:30"),
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("2020-01-01", "2020-01-01"),
        ("null", None),
        ("~", None),
        ("'12'", "12"),
        ('"true"', "true"),
        ("!!str 12", "12"),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_values_follow_yaml_1_2(written: str, value: object) -> None:
    found = read(f"a: {written}\n", "f.yaml").data["a"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_text_as_written() -> None:
    assert read("{on: 1, 1.10: 2, null: 3, true: 4}", "f.yaml").data == {
        "on": 1,
        "1.10": 2,
        "null": 3,
        "true": 4,
    }


def test_lines_are_those_of_keys_and_items() -> None:
    document = read("a:\n  b:\n  - 1\n  - c: 2\n    d: 3\n", "f.yaml")
    assert [
        document.line(path) for path in [("a",), ("a", "b"), ("a", "b", 0), ("a", "b", 1), ("a", "b", 1, "d")]
    ] == [1, 2, 3, 4, 5]


def test_the_line_of_what_is_absent_is_that_of_its_nearest_ancestor() -> None:
    document = read("a: 1\nb:\n  c: 1\n", "f.yaml")
    assert document.line(("b", "x", 3)) == 2
    assert document.line(("x",)) == 1


def test_all_duplicate_keys_are_reported() -> None:
    assert problems("a: 1\nb: {c: 1, c: 2}\na: 3\n") == [
        "f.yaml:2: duplicate key `c` (first on line 2); keep one of them",
        "f.yaml:3: duplicate key `a` (first on line 1); keep one of them",
    ]


def test_merge_keys_are_refused() -> None:
    assert problems("x: &x {a: 1}\ny:\n  <<: *x\n") == [
        "f.yaml:3: merge keys (`<<`) are not understood here nor by Envoy; write the keys out"
    ]


def test_aliases_are_copies_and_their_lines_those_of_the_definition() -> None:
    document = read("a: &a\n  b: [1]\nc: *a\n", "f.yaml")
    document.data["c"]["b"].append(2)
    assert document.data["a"] == {"b": [1]}
    assert (document.line(("c",)), document.line(("c", "b"))) == (3, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: *b\n", "f.yaml:1: alias `*b` names no finished anchor; define `&b` before it"),
        ("a: &a [*a]\n", "f.yaml:1: alias `*a` names no finished anchor; define `&a` before it"),
        ("- 1\n", "f.yaml:1: the file must hold keys with values (`key: value`)"),
        ("a: 1\n---\nb: 1\n", "f.yaml:2: a second YAML document begins here; write one document a file"),
        (
            "a: !!python/object:os.system x\n",
            "f.yaml:1: tag `tag:yaml.org,2002:python/object:os.system` is not understood; remove it",
        ),
        (
            "? [a]\n: 1\n",
            "f.yaml:1: a key must be plain text, not a mapping or list; quote it if it begins with { or [",
        ),
        ("a: 1\nb: c: d\n", "f.yaml:2: not valid YAML: mapping values are not allowed in this context"),
        (
            "a:\n\tb: 1\n",
            "f.yaml:2: not valid YAML: found character that cannot start any token (while scanning for the "
            "next "
            "token); the line holds a tab: indent with spaces",
        ),
    ],
)
def test_faults_name_their_line(text: str, message: str) -> None:
    assert problems(text) == [message]


def test_a_small_file_cannot_become_a_huge_tree() -> None:
    text = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
    for level in range(1, 10):
        text += f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n"
    assert problems(text) == [
        f"f.yaml:6: more than {yaml_source.MAX_NODES} values once aliases are expanded; make the file smaller"
    ]


def test_nesting_is_capped_also_through_aliases() -> None:
    text = "a0: &a0 [x]\n" + "".join(f"a{level}: &a{level} [*a{level - 1}]\n" for level in range(1, 100))
    assert problems(text) == ["f.yaml:63: nested deeper than 64 levels; flatten the file"]
    assert problems("a: " + "[" * 65) == ["f.yaml:1: nested deeper than 64 levels; flatten the file"]


def test_a_file_that_is_not_there_or_not_text_is_a_problem(tmp_path: Path) -> None:
    folder = tmp_path
    with pytest.raises(ConfigError, match=r"x\.yaml:0: cannot be read: No such file or directory"):
        read_file(folder / "x.yaml", "x.yaml")
    (folder / "y.yaml").write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r"y\.yaml:2: is not UTF-8 text; save the file as UTF-8"):
        read_file(folder / "y.yaml", "y.yaml")


yaml_like = st.lists(
    st.sampled_from(
        [
            "a",
            "b: ",
            "- ",
            "\n",
            "  ",
            "{",
            "}",
            "[",
            "]",
            "&x ",
            "*x",
            "<<: ",
            "'",
            '"',
            "!!int ",
            "|",
            "?",
            "#",
            "\t",
            "%",
            "---\n",
            "1",
            ",",
        ]
    ),
    max_size=40,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.one_of(yaml_like, st.text(max_size=60)))
def test_reading_raises_nothing_but_config_errors(text: str) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(read(text, "f.yaml").data, dict)
