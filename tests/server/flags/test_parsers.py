import pathlib

import pytest

from tokenmill_server.flags import parsers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1.5k", 1500),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("4G", 4 * 2**30),
        ("0.5g", 500_000_000),
        ("1T", 2**40),
        ("1_000", 1000),
        (" 7 ", 7),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parsers.parse_size(text) == value


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "1e3", "-1", "3kb", "0.0001k", "nan", "12 k"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parsers.parse_size(text)


def test_integer_limits_and_types() -> None:
    parse = parsers.integer(0, 65535)
    assert [parse(value) for value in ("8k", 80, 80.0, "0")] == [8000, 80, 80, 0]
    for value in ("65536", -1, "-1", True, 1.5, None, [1], "x"):
        with pytest.raises(ValueError, match="0 to 65535"):
            parse(value)


def test_length_or_auto() -> None:
    assert [parsers.length_or_auto(value) for value in ("auto", -1, "-1", "32K", 9)] == [
        "auto",
        "auto",
        "auto",
        32768,
        9,
    ]
    for value in (0, "-2", "long", None):
        with pytest.raises(ValueError, match="or auto"):
            parsers.length_or_auto(value)


def test_number_refuses_what_is_not_finite_or_out_of_range() -> None:
    parse = parsers.number(0, 1, exclude_minimum=True)
    assert [parse(value) for value in ("0.9", 1, "1e-3")] == [0.9, 1.0, 0.001]
    for value in ("nan", "inf", 0, "0", 1.01, True, "x", None):
        with pytest.raises(ValueError, match="above 0 and at most 1"):
            parse(value)


def test_one_of_takes_any_case_and_aliases() -> None:
    parse = parsers.one_of("auto", "float16", aliases={"half": "float16"})
    assert [parse(value) for value in ("AUTO", "half", "Float16")] == ["auto", "float16", "float16"]
    with pytest.raises(ValueError, match="auto, float16"):
        parse("int8")


def test_one_of_gives_reasons_against_known_values() -> None:
    parse = parsers.one_of("uni", "mp", refused={"ray": "there is no Ray"})
    with pytest.raises(ValueError, match=r"^one of uni, mp \(there is no Ray\)$"):
        parse("Ray")
    for value in ("dask", 3, ["ray"]):
        with pytest.raises(ValueError, match=r"^one of uni, mp$"):
            parse(value)


def test_subset_of() -> None:
    parse = parsers.subset_of("a", "b")
    assert [parse(value) for value in ("a", "b, a", ["b"], "a,a")] == [("a",), ("b", "a"), ("b",), ("a",)]
    for value in ("", "c", "a,c", [], 3):
        with pytest.raises(ValueError, match="a or b"):
            parse(value)


def test_texts() -> None:
    assert parsers.text("x") == "x"
    assert parsers.text(7) == "7"
    assert parsers.path_text(pathlib.Path("/a/b")) == "/a/b"
    assert parsers.text_list(["b", "a", "b"]) == ("b", "a")
    assert parsers.text_list("a") == ("a",)
    for value in ("", True, None, {}):
        with pytest.raises(ValueError, match="text"):
            parsers.text(value)
    with pytest.raises(ValueError, match="text"):
        parsers.text_list([])


def test_boolean() -> None:
    assert [parsers.boolean(value) for value in (True, "true", "ON", 1, "1")] == [True] * 5
    assert [parsers.boolean(value) for value in (False, "false", "no", 0, "0")] == [False] * 5
    for value in ("", "2", 2, None, 1.0):
        with pytest.raises(ValueError, match="true or false"):
            parsers.boolean(value)
