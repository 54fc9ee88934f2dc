"""Files of JSON lines: one value a line, UTF-8 with or without a byte-order mark, any kind of line end.

It knows bytes and JSON. It does not know what the values mean; prompts and the ids of an audit are both read here.
"""

import codecs
import json
import re

OTHER_ENCODING = "save the file as UTF-8"


def json_lines(path):
    r"""The values of a file, one after the other, each with its place; blank lines are left out.

    A value is read when it is asked for, so that whoever wants three lines of a long file reads three.

    Returns
    -------
    iterator of (str, int, value)
        The place as an error message names it, such as "mine.jsonl, line 3", the number of the line, what stands there.

    Raises
    ------
    ValueError
        For a line that is not UTF-8, is no JSON, or holds half a surrogate pair; the place is named.
    """
    number = 0
    with open(path, "rb") as file:
        for block in file:  # ends at "\n"
            for line in block.splitlines():  # and at "\r"; U+2028 and its like end no line of JSON
                number += 1
                place = f"{path}, line {number}"
                text = _decode(line, place).removeprefix("\ufeff" if number == 1 else "")
                if text.strip():
                    yield place, number, _parse(text, place)


def _decode(line, place):
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line:
        raise ValueError(f"{place}: this is UTF-16 or UTF-32; {OTHER_ENCODING}")
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place}: byte {error.start + 1} of the line, 0x{line[error.start]:02x}, is not UTF-8 (Latin-1 or "
            f"Windows-1252, perhaps); {OTHER_ENCODING}"
        ) from error


def _parse(text, place):
    try:
        value = json.loads(text, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: this is no JSON ({error}); each line holds one value") from error
    if half := re.search("[\ud800-\udfff]", json.dumps(value, ensure_ascii=False)):
        raise ValueError(f"{place}: \\u{ord(half[0]):04x} is half of a surrogate pair, which is no character")
    return value


def no_number(name):
    """For `json.loads(..., parse_constant=no_number)`: refuse what Python reads and JSON does not know."""
    raise ValueError(f"{name} is no number that JSON knows")
