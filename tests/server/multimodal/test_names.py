"""Names of files, and those that clients give."""

import pytest

from tokenmill_server.multimodal.names import NAME_BYTES, AmbiguousNameError, MediaNames, file_name, given_name

KEYS = [bytes([number]) * 32 for number in range(9)]


def test_a_name_leads_to_the_key_that_it_was_given() -> None:
    names = MediaNames(1 << 20)
    assert names.find(b"a") is None
    for name, key in ((b"a", KEYS[0]), (b"b", KEYS[0]), (b"c", KEYS[1]), (b"a", KEYS[0])):
        names.remember(name, key)
    assert [names.find(name) for name in (b"a", b"b", b"c")] == [KEYS[0], KEYS[0], KEYS[1]]


def test_one_of_two_keys_is_none_of_them_for_ever() -> None:
    names = MediaNames(1 << 20)
    for key in (KEYS[0], KEYS[1], KEYS[0], KEYS[0]):
        names.remember(b"a", key)
    with pytest.raises(AmbiguousNameError):
        names.find(b"a")


def test_the_oldest_go_when_there_is_no_more_room() -> None:
    names = MediaNames(3 * NAME_BYTES)
    for number in range(3):
        names.remember(KEYS[number], KEYS[number])
    names.find(KEYS[0])
    names.remember(KEYS[3], KEYS[3])
    assert [names.find(KEYS[number]) is not None for number in range(4)] == [True, False, True, True]
    assert len(names) == 3


def test_all_that_matters_is_in_a_name() -> None:
    files = [file_name(data, kind, options) for data in (b"x", b"y") for kind in ("image", "video") for options in "ab"]
    given = [
        given_name(scope, uuid, kind, options)
        for scope in (("key", ""), ("", "key"), ("k", "ey"), ())
        for uuid in ("u", "v")
        for kind in ("image", "video")
        for options in ("a", "b")
    ]
    assert len({*files, *given}) == len(files) + len(given)
    assert given_name(("a",), "bc", "image", "d") != given_name(("ab",), "c", "image", "d")
    assert file_name(b"x", "image", "a") == files[0]
