"""Registry files whose text was damaged, or is written otherwise."""

from __future__ import annotations

import json

from hypothesis import strategies as st
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome
from tests.fuzz.registries import TEXT, judge, lines, parsed

KINDS = Kinds("registry")


@KINDS.add
def flipped_bits(case: Case) -> Outcome:
    data = bytearray(TEXT.encode())
    for _ in range(case.number(1, 3, "flips")):
        data[case.number(0, len(data) - 1, "byte")] ^= 1 << case.number(0, 7, "bit")
    return judge(bytes(data))


@KINDS.add
def cut_off(case: Case) -> Outcome:
    return judge(TEXT[: case.number(0, len(TEXT) - 2, "characters")])


@KINDS.add
def lines_left_out(case: Case) -> Outcome:
    kept = lines()
    for _ in range(case.number(1, 3, "lines")):
        del kept[case.number(0, len(kept) - 1, "line")]
    return judge("".join(kept))


@KINDS.add
def a_line_twice(case: Case) -> Outcome:
    at = case.number(0, len(lines()) - 1, "line")
    return judge("".join([*lines()[: at + 1], *lines()[at:]]))


@KINDS.add
def a_line_indented(case: Case) -> Outcome:
    given = lines()
    at = case.number(0, len(given) - 1, "line")
    by = case.number(-3, 5, "columns")
    given[at] = given[at][-by:] if by < 0 else " " * by + given[at]
    return judge("".join(given))


@KINDS.add
def tabs(case: Case) -> Outcome:
    given = lines()
    at = case.one_of([at for at, line in enumerate(given) if line.startswith(" ")], "line")
    given[at] = given[at].replace("  ", "\t", 1)
    return judge("".join(given))


@KINDS.add
def two_lines_swapped(case: Case) -> Outcome:
    given = lines()
    one, two = case.number(0, len(given) - 1, "one"), case.number(0, len(given) - 1, "two")
    given[one], given[two] = given[two], given[one]
    return judge("".join(given))


@KINDS.add
def sections_in_another_order(case: Case) -> Outcome:
    document = parsed(TEXT)
    order = case.draw(st.permutations(list(document)), "order")
    return judge("".join(f"{key}: {json.dumps(document[key])}\n" for key in order), same=True)


@KINDS.add
def another_encoding(case: Case) -> Outcome:
    encoding = case.one_of(["utf-16", "utf-16-le", "utf-32", "utf-8-sig", "cp037", "utf-7"])
    if encoding == "utf-7":
        return judge(TEXT.encode("utf-7"))
    return judge(TEXT.encode(encoding))


@KINDS.add
def other_line_ends(case: Case) -> Outcome:
    end = case.one_of(["\r\n", "\r", "\n\n", "\n\r\n", " \n", "\x85", "\u2028", "\x0b"], "end")
    same = end not in ("\x85", "\u2028", "\x0b")
    return judge(TEXT.replace("\n", end).encode(), same=same)


@KINDS.add
def another_style(case: Case) -> Outcome:
    document = parsed(TEXT)
    style = case.one_of(["json", "json in lines", "start and end", "quoted", "comments"])
    text = {
        "json": json.dumps(document),
        "json in lines": json.dumps(document, indent=3),
        "start and end": f"---\n{TEXT}...\n",
        "quoted": TEXT.replace("use:", '"use":').replace("recd.ikjt", "'recd.ikjt'"),
        "comments": TEXT.replace("\n", " # use: nothing\n"),
    }[style]
    return judge(text, same=True)


@KINDS.add
def several_documents(case: Case) -> Outcome:
    other = case.one_of(["", "a: 1\n", TEXT, "- 1\n", "null\n"], "other")
    return judge(case.one_of([f"{TEXT}---\n{other}", f"{other}\n---\n{TEXT}"]))


@KINDS.add
def directives_and_tags(case: Case) -> Outcome:
    text = case.one_of(
        [
            "%YAML 1.1\n---\n" + TEXT,
            "%YAML 9.9\n---\n" + TEXT,
            "%TAG ! tag:x,2000:\n---\n" + TEXT,
            TEXT.replace("steps: 3", "steps: !!int '3'"),
            TEXT.replace("steps: 3", "steps: !!float 3"),
            TEXT.replace("use: recd.ikjt", "use: !!python/name:os.system recd.ikjt"),
            TEXT.replace("path: table", "path: !!python/object/apply:os.getcwd []"),
            TEXT.replace("path: table", "path: !!binary dGFibGU="),
            TEXT.replace("[4]", "!!set {4}", 1),
            TEXT.replace("seed: 7", "seed: !local 7"),
            TEXT.replace("dataset:", "dataset: !!omap", 1),
        ]
    )
    return judge(text)


@KINDS.add
def anchors_and_aliases(case: Case) -> Outcome:
    text, same = case.one_of(
        [
            (TEXT.replace("[4]", "&mlp [4]", 1).replace("top_mlp: [4]", "top_mlp: *mlp"), True),
            (TEXT.replace("path: table", "path: &here table"), True),
            (TEXT.replace("path: table", "path: *nowhere"), False),
            (TEXT.replace("[4]", "&a [*a]", 1), False),
            (TEXT.replace("model:\n", "model: &model\n").replace("seed: 7", "<<: *model"), False),
            (TEXT.replace("seed: 7", "<<: {seed: 7}"), False),
            (TEXT.replace("seed: 7", "<<: [{seed: 7}, {seed: 8}]"), False),
            (TEXT.replace("seed: 7", '"<<": 7'), False),
            (TEXT.replace("seed: 7", "seed: &x 7\n  &x epochs: 1"), False),
        ]
    )
    return judge(text, same=same)


@KINDS.add
def nested_deeply(case: Case) -> Outcome:
    depth = case.one_of([50, 500, 5000], "depth")
    opening, closing = case.one_of([("[", "]"), ("{a: ", "}"), ("- ", "")], "of")
    where = case.one_of(["sparse", "top", "key"], "at")
    deep = opening * depth + "1" + closing * depth
    if opening == "- ":
        deep = (
            "\n"
            + "".join("  " * at + "-\n" for at in range(2, depth + 2))
            + "  " * (depth + 2)
            + "1"
        )
    if where == "sparse":
        return judge(TEXT.replace("[user, items]", deep), refuse=True)
    if where == "key":
        return judge(f"{TEXT}? {deep}\n: 1\n", refuse=True)
    return judge(f"{TEXT}extra: {deep}\n", refuse=True)


test_registry = KINDS.test()
