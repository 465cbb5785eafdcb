"""Files in a folder of plugins that do what no plugin should."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, Kinds
from tests.fuzz.oracle import Outcome, recd, wrong

KINDS = Kinds("plugins")

HEAD = """\
from recd_plugins.hookspecs import hookimpl
from recd_plugins.interfaces import PluginOptions, Preprocessing
"""
CLASS = """
class Same(Preprocessing):
    "Leaves ids as they are."
    name = "acme.same"
    def transform(self, values, offsets):
        return values, offsets
"""
HOOK = """
@hookimpl
def register_preprocessing():
    return [Same]
"""
GOOD = HEAD + CLASS + HOOK

#: What code may end with.
RAISED = [
    "raise ValueError('odd')",
    "raise RuntimeError",
    "1 / 0",
    "raise StopIteration",
    "raise MemoryError",
    "raise RecursionError",
    "raise ImportError('no module named x')",
    "raise OSError(5, 'x')",
    "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'x')",
    "raise ExceptionGroup('several', [ValueError('x')])",
    "assert False",
    "import nothing_of_this_name",
    "(lambda f: f(f))(lambda f: f(f))",
    "undefined",
    "raise SystemExit",
    "raise SystemExit(0)",
    "import sys; sys.exit('bye')",
]


def write(text: str | bytes, name: str = "acme.py") -> None:
    path = Path("plugins", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def judge(*, refuse: bool = False, name: object = "plugins") -> Outcome:
    """Refused, saying which file; or it trains as if the plugin were not there."""
    tables.write_two()
    registry = tables.registry().replace(
        "preprocessing:\n", "preprocessing:\n  - {use: acme.same, features: ['*']}\n"
    )
    Path("registry.yaml").write_text(registry, encoding="utf-8")
    arguments = ("--plugins-dir", "plugins", "run", "registry.yaml", "--json", "figures.json")
    done = recd(*arguments)
    if not done.ok:
        return done.refused(name)
    if refuse:
        wrong(f"{done} took what it should refuse: {done.output[-300:]}")
    if not Path("figures.json").exists():
        wrong(f"{done} succeeded and did nothing: {done.output!r}")
    found = tables.figures()
    if found != tables.losses_of(tables.rows()):
        wrong(f"other losses with a plugin that changes nothing: {found}")
    return Outcome.RIGHT


def raises(code: str, indent: str = "    ") -> str:
    return "".join(f"{indent}{line}\n" for line in code.split("; "))


@KINDS.add
def raising_at_import(case: Case) -> Outcome:
    code = raises(case.one_of(RAISED, "code"), "")
    write(case.one_of([code + GOOD, GOOD + code], "text"))
    return judge(refuse=True)


@KINDS.add
def raising_in_the_hook(case: Case) -> Outcome:
    code = raises(case.one_of(RAISED, "code"))
    write(HEAD + CLASS + "\n@hookimpl\ndef register_preprocessing():\n" + code)
    return judge(refuse=True)


@KINDS.add
def raising_in_the_making(case: Case) -> Outcome:
    code = raises(case.one_of(RAISED, "code"), "        ")
    write(HEAD + CLASS + "    def __init__(self, options):\n" + code + HOOK)
    return judge(refuse=True, name="")


@KINDS.add
def raising_in_a_method(case: Case) -> Outcome:
    code = raises(case.one_of(RAISED, "code"), "        ")
    write(HEAD + CLASS.replace("        return values, offsets\n", code) + HOOK)
    return judge(refuse=True, name="acme")


@KINDS.add
def raising_in_the_options(case: Case) -> Outcome:
    code = raises(case.one_of(RAISED, "code"), "            ")
    options = (
        "    class Options(PluginOptions):\n        x: int = 0\n"
        "        def model_post_init(self, context):\n" + code
    )
    write(HEAD + CLASS + options + HOOK)
    return judge(refuse=True, name="")


@KINDS.add
def raising_in_the_commands(case: Case) -> Outcome:
    """Commands of plugins are asked for where the command is no built-in one."""
    code = raises(case.one_of(RAISED, "code"))
    write(GOOD + "\n@hookimpl\ndef register_commands(cli):\n" + code)
    tables.write_two()
    return recd("--plugins-dir", "plugins", "cluster", "table", "new").refused("acme.py")


@KINDS.add
def commands_that_are_none(case: Case) -> Outcome:
    code = case.one_of(
        [
            "cli.add_command(None)",
            "cli.add_command(5)",
            "cli.add_command(print, 'x')",
            "cli.command('run')(lambda: None)",
            "cli.command('cluster')(lambda: None)",
            "cli.add_command('x', 'y')",
            "cli.commands.clear()",
            "cli.nothing()",
            "cli.command(5)(lambda: None)",
        ]
    )
    write(GOOD + f"\n@hookimpl\ndef register_commands(cli):\n    {code}\n")
    tables.write_two()
    done = recd("--plugins-dir", "plugins", "cluster", "table", "new")
    if done.ok:
        return Outcome.RIGHT
    return done.refused("acme.py") if "No such command" not in done.output else done.refused()


@KINDS.add
def hooks_that_return_something_else(case: Case) -> Outcome:
    value = case.one_of(
        [
            "None",
            "Same",
            "[None]",
            "[5]",
            "'acme.same'",
            "{'acme.same': Same}",
            "[[Same]]",
            "5",
            "[Same, Same]",
            "[Same()]",
            "[type('X', (), {'name': 'acme.same'})]",
            "[object]",
            "[Preprocessing]",
            "b''",
            "iter([Same, 1 / 0 if Same else 0])",
            "(each / 0 for each in [1])",
            "True",
            "[Same.transform]",
        ],
        "value",
    )
    write(HEAD + CLASS + f"\n@hookimpl\ndef register_preprocessing():\n    return {value}\n")
    return judge(refuse=True, name="acme")


@KINDS.add
def hooks_of_another_form(case: Case) -> Outcome:
    hook = case.one_of(
        [
            "def register_preprocessing():\n    return [Same]\n",
            "@hookimpl\ndef register_preprocessings():\n    return [Same]\n",
            "@hookimpl\ndef register_preprocessing(cli):\n    return [Same]\n",
            "@hookimpl\ndef register_preprocessing(*, wanted):\n    return [Same]\n",
            "@hookimpl\nasync def register_preprocessing():\n    return [Same]\n",
            "register_preprocessing = hookimpl(5)\n",
            "@hookimpl(hookwrapper=True)\ndef register_preprocessing():\n    return [Same]\n",
            "@hookimpl(hookwrapper=True)\ndef register_preprocessing():\n    yield\n",
            "@hookimpl(wrapper=True)\ndef register_preprocessing():\n    return (yield)\n",
            "@hookimpl\ndef register_preprocessing():\n    yield Same\n    raise ValueError\n",
            "@hookimpl\nclass register_preprocessing:\n    pass\n",
            "",
        ],
        "hook",
    )
    write(HEAD + CLASS + hook)
    return judge(refuse=True)


@KINDS.add
def classes_of_another_form(case: Case) -> Outcome:
    old, new = case.one_of(
        [
            ('    name = "acme.same"\n', ""),
            ('"acme.same"', '"same"'),
            ('"acme.same"', '"Acme.Same"'),
            ('"acme.same"', "5"),
            ('"acme.same"', "None"),
            ('"acme.same"', "property(lambda self: 'acme.same')"),
            ('"acme.same"', '"acme.same\\n"'),
            ('"acme.same"', '"recd.sigrid_hash"'),
            ("(Preprocessing)", ""),
            ("(Preprocessing)", "(dict)"),
            ('    "Leaves ids as they are."\n', ""),
            ("    def transform", "    def transfrom"),
            ("    def transform", "    Options = None\n    def transform"),
            ("    def transform", "    Options = dict\n    def transform"),
            ("    def transform", "    Options = PluginOptions()\n    def transform"),
            (
                "    def transform",
                "    class Options(PluginOptions):\n        x: int\n    def transform",
            ),
            ("    def transform", "    takes = ('words',)\n    def transform"),
            ("    def transform", "    takes = 5\n    def transform"),
            ("    def transform", "    takes = ()\n    def transform"),
            ("    def transform", "    __slots__ = ()\n    __init__ = None\n    def transform"),
            ("self, values, offsets", "self, values"),
            ("self, values, offsets", "values, offsets"),
            ("self, values, offsets", "self, values, offsets, more"),
            ("    def transform", "    transform = None\n    def other"),
        ],
        "change",
    )
    write(HEAD + CLASS.replace(old, new, 1) + HOOK)
    return judge(refuse=True, name="")


@KINDS.add
def transforms_that_return_something_else(case: Case) -> Outcome:
    value = case.one_of(
        [
            "None",
            "values",
            "(values,)",
            "(values, offsets, values)",
            "(values.float(), offsets)",
            "(values.int(), offsets)",
            "(values, offsets[:-1])",
            "(values[:-1], offsets)",
            "(values, offsets + 1)",
            "(values, offsets.flip(0))",
            "(values.tolist(), offsets)",
            "(values, offsets.tolist())",
            "(values.numpy(), offsets.numpy())",
            "(values[None], offsets)",
            "(values, offsets.float())",
            "(values.to('meta'), offsets)",
            "(values.to_sparse(), offsets)",
            "'ab'",
            "(None, None)",
            "(values.bool(), offsets)",
            "(offsets, values)",
            "(values, offsets[None])",
            "(values, offsets[[0, 2, 1, *range(3, len(offsets))]])",
        ],
        "value",
    )
    write(HEAD + CLASS.replace("return values, offsets", f"return {value}") + HOOK)
    return judge(refuse=True, name="acme.same")


@KINDS.add
def files_that_are_no_python(case: Case) -> Outcome:
    content = case.one_of(
        [
            b"def",
            b"\xff\xfe",
            GOOD.encode("utf-16"),
            b"\0",
            b"# coding: nothing\n",
            b"(" * 500,
            b"x = " + b"9" * 5000,
            b"return",
            b"\x1b",
            b"\tx\n  y\n",
            b"print 'x'\n",
            b"",
            b"#",
            b"x" * 100000,
            b"# coding: latin-1\n'\xe4'\n",
        ]
    )
    write(content)
    return judge(refuse=True)


@KINDS.add
def names_of_files(case: Case) -> Outcome:
    """A file's name hides no module and may be anything."""
    name = case.one_of(
        [
            "torch.py",
            "json.py",
            "recd_plugins.py",
            "click.py",
            "a b.py",
            "1.py",
            "ä.py",
            "class.py",
            "a-b.py",
            "a.b.py",
            "%s.py",
            "{x}.py",
            "a'b.py",
            "a\nb.py",
            "pack/__init__.py",
            "torch/__init__.py",
        ]
    )
    write(GOOD, name)
    return judge()


@KINDS.add
def files_that_are_left_out(case: Case) -> Outcome:
    write(GOOD)
    name = case.one_of(
        ["_odd.py", ".odd.py", "odd.txt", "odd.pyc", "__pycache__/x.pyc", "odd/x.py"]
    )
    write("raise ValueError\n", name)
    return judge()


@KINDS.add
def two_plugins_of_one_name(case: Case) -> Outcome:
    write(GOOD)
    name = case.one_of(["acme2.py", "other/__init__.py", "ACME.py", "link.py"], "name")
    if name == "link.py":
        os.symlink("acme.py", "plugins/link.py")
        tables.write_two()
        return judge()  # one file by two names
    write(GOOD, name)
    return judge(refuse=True)


@KINDS.add
def folders_that_are_none(case: Case) -> Outcome:
    what = case.one_of(["missing", "file", "empty", "loop"], "what")
    if what == "file":
        Path("plugins").write_text(GOOD)
    elif what == "empty":
        Path("plugins").mkdir()
    elif what == "loop":
        os.symlink("plugins", "plugins")
    return judge(refuse=True, name="acme.same" if what == "empty" else "plugins")


@KINDS.add
def entries_that_are_no_files(case: Case) -> Outcome:
    write(GOOD)
    what = case.one_of(["folder", "dangling", "loop", "empty folder"], "what")
    if what == "folder":
        Path("plugins/x.py").mkdir()
    elif what == "empty folder":
        Path("plugins/x").mkdir()
    else:
        os.symlink("nowhere" if what == "dangling" else "x.py", "plugins/x.py")
    return judge()


@KINDS.add
def talkative_plugins(case: Case) -> Outcome:
    """What a plugin prints changes nothing."""
    code = case.one_of(
        [
            "print('hello')",
            "import sys; sys.stderr.write('x')",
            "import warnings; warnings.warn('x')",
            "import logging; logging.error('x')",
            "print('\\x1b[2J')",
            "import sys; sys.setrecursionlimit(900)",
            "import os; os.environ['X'] = 'y'",
        ]
    )
    write(raises(code, "") + GOOD)
    return judge()


@KINDS.add
def changes_of_its_arguments(case: Case) -> Outcome:
    """Transforms leave values and offsets as they are: what is changed in place is no table's."""
    code = case.one_of(["values.zero_()", "values += 1", "offsets.zero_()", "values.resize_(0)"])
    text = CLASS.replace(
        "return values",
        f"kept = values.clone(), offsets.clone(); {code}; return kept; return values",
    )
    write(HEAD + text + HOOK)
    return judge(name="acme.same")


test_plugins = KINDS.test()
