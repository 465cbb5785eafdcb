"""Files in a folder of plugins that do what no plugin should."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fuzz import tables
from tests.fuzz.cases import Case, fuzz, recd, wrong

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
SIGNATURE = "@hookimpl\ndef register_preprocessing():\n"
HOOK = f"\n{SIGNATURE}    return [Same]\n"
GOOD = HEAD + CLASS + HOOK
#: How code may end.
RAISED = [
    *("raise ValueError('odd')", "raise RuntimeError", "1 / 0", "raise StopIteration"),
    *("raise MemoryError", "raise RecursionError", "raise ImportError('no module named x')"),
    *("raise OSError(5, 'x')", "raise UnicodeDecodeError('utf-8', b'x', 0, 1, 'x')"),
    *("raise ExceptionGroup('several', [ValueError('x')])", "assert False", "undefined"),
    *("import nothing_of_this_name", "(lambda f: f(f))(lambda f: f(f))", "raise SystemExit"),
    *("raise SystemExit(0)", "import sys; sys.exit('bye')"),
]


def write(text: str | bytes, name: str = "acme.py") -> None:
    path = Path("plugins", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())


def judge(*, refuse: bool = False, name: object = "plugins") -> None:
    """Refused, saying which file; or it trains as if the plugin were not there."""
    tables.write_two()
    entry = "preprocessing:\n  - {use: acme.same, features: ['*']}\n"
    tables.write_registry(tables.registry().replace("preprocessing:\n", entry))
    line = ("--plugins-dir", "plugins", "run", "registry.yaml", "--json", "figures.json")
    done = recd(*line)
    if not done.ok:
        done.refused(name)
    elif refuse:
        wrong(f"{done} took what it should refuse: {done.output[-300:]}")
    elif tables.figures() != tables.losses_of(tables.rows()):
        wrong(f"other losses with a plugin that changes nothing: {tables.figures()}")


def raises(code: str, indent: str = "    ") -> str:
    return "".join(f"{indent}{line}\n" for line in code.split("; "))


@fuzz
def test_raising(case: Case) -> None:
    """At import, in the hook, the making, a method, the options."""
    code = case.one_of(RAISED, "code")
    options = "    class Options(PluginOptions):\n        x: int = 0\n"
    options += "        def model_post_init(self, context):\n" + raises(code, " " * 12)
    text, name = case.one_of(
        [
            (raises(code, "") + GOOD, "plugins"),
            (GOOD + raises(code, ""), "plugins"),
            (HEAD + CLASS + "\n" + SIGNATURE + raises(code), "plugins"),
            (
                HEAD + CLASS + "    def __init__(self, options):\n" + raises(code, " " * 8) + HOOK,
                "",
            ),
            (
                HEAD
                + CLASS.replace("        return values, offsets\n", raises(code, " " * 8))
                + HOOK,
                "acme",
            ),
            (HEAD + CLASS + options + HOOK, ""),
        ],
        "where",
    )
    write(text)
    judge(refuse=True, name=name)


@fuzz
def test_commands_that_are_none(case: Case) -> None:
    """Commands of plugins are asked for where the command is no built-in one."""
    lines = [
        *("cli.add_command(None)", "cli.add_command(5)", "cli.add_command(print, 'x')"),
        *("cli.command('run')(lambda: None)", "cli.command('cluster')(lambda: None)"),
        *("cli.add_command('x', 'y')", "cli.commands.clear()", "cli.nothing()"),
    ]
    code = case.one_of([*lines, "cli.command(5)(lambda: None)", *RAISED], "code")
    write(GOOD + "\n@hookimpl\ndef register_commands(cli):\n" + raises(code))
    tables.write_two()
    done = recd("--plugins-dir", "plugins", "cluster", "table", "new")
    if code in RAISED or (not done.ok and "No such command" not in done.output):
        done.refused("acme.py")


@fuzz
def test_hooks_of_another_form(case: Case) -> None:
    values = [
        *("None", "Same", "[None]", "[5]", "'acme.same'", "{'acme.same': Same}", "[[Same]]", "5"),
        *("[Same, Same]", "[Same()]", "[type('X', (), {'name': 'acme.same'})]", "[object]"),
        *("[Preprocessing]", "b''", "iter([Same, 1 / 0 if Same else 0])", "True"),
        *("(each / 0 for each in [1])", "[Same.transform]"),
    ]
    wrapper = SIGNATURE.replace("@hookimpl", "@hookimpl(hookwrapper=True)")
    hook = case.one_of(
        [
            *(f"{SIGNATURE}    return {value}\n" for value in values),
            "def register_preprocessing():\n    return [Same]\n",
            "@hookimpl\ndef register_preprocessings():\n    return [Same]\n",
            *(HOOK.replace("()", each) for each in ("(cli)", "(*, wanted)")),
            HOOK.replace("def", "async def"),
            "register_preprocessing = hookimpl(5)\n",
            f"{wrapper}    return [Same]\n",
            f"{wrapper}    yield\n",
            f"{SIGNATURE.replace('@hookimpl', '@hookimpl(wrapper=True)')}    return (yield)\n",
            f"{SIGNATURE}    yield Same\n    raise ValueError\n",
            "@hookimpl\nclass register_preprocessing:\n    pass\n",
            "",
        ],
        "hook",
    )
    write(HEAD + CLASS + "\n" + hook)
    judge(refuse=True, name="acme")


@fuzz
def test_files_that_are_no_python(case: Case) -> None:
    contents = [
        *(b"def", b"\xff\xfe", GOOD.encode("utf-16"), b"\0", b"# coding: nothing\n", b"(" * 500),
        *(b"x = " + b"9" * 5000, b"return", b"\x1b", b"\tx\n  y\n", b"print 'x'\n", b"", b"#"),
    ]
    write(case.one_of([*contents, b"x" * 100000, b"# coding: latin-1\n'\xe4'\n"]))
    judge(refuse=True)


@fuzz
def test_names_of_files(case: Case) -> None:
    """A file's name hides no module and may be anything."""
    names = (
        "torch.py json.py recd_plugins.py click.py 1.py ä.py class.py a-b.py a.b.py %s.py {x}.py"
    )
    more = ["a b.py", "a'b.py", "a\nb.py", "pack/__init__.py", "torch/__init__.py"]
    write(GOOD, case.one_of([*names.split(), *more]))
    judge()


@fuzz
def test_entries_that_are_left_out(case: Case) -> None:
    write(GOOD)
    names = "_odd.py .odd.py odd.txt odd.pyc __pycache__/x.pyc odd/x.py folder nowhere x.py empty"
    what = case.one_of(names.split(), "what")
    if what in ("folder", "empty"):
        Path("plugins/x.py" if what == "folder" else "plugins/x").mkdir()
    elif what in ("nowhere", "x.py"):
        os.symlink(what, "plugins/x.py")
    else:
        write("raise ValueError\n", what)
    judge()


@fuzz
def test_two_plugins_of_one_name(case: Case) -> None:
    write(GOOD)
    name = case.one_of(["acme2.py", "other/__init__.py", "ACME.py", "link.py"], "name")
    if name == "link.py":
        os.symlink("acme.py", "plugins/link.py")
        judge()  # one file by two names
    else:
        write(GOOD, name)
        judge(refuse=True)


@fuzz
def test_folders_that_are_none(case: Case) -> None:
    what = case.one_of(["missing", "file", "empty", "loop"], "what")
    if what == "file":
        Path("plugins").write_text(GOOD)
    elif what == "empty":
        Path("plugins").mkdir()
    elif what == "loop":
        os.symlink("plugins", "plugins")
    judge(refuse=True, name="acme.same" if what == "empty" else "plugins")


@fuzz
def test_talkative_plugins(case: Case) -> None:
    """Prints of a plugin change nothing, nor does an in-place change of its arguments."""
    code = case.one_of(
        [
            *("print('hello')", "import sys; sys.stderr.write('x')", "print('\\x1b[2J')"),
            *("import warnings; warnings.warn('x')", "import logging; logging.error('x')"),
            *("import sys; sys.setrecursionlimit(900)", "import os; os.environ['X'] = 'y'"),
        ]
    )
    change = case.one_of(["values.zero_()", "values += 1", "offsets.zero_()", "pass"])
    kept = f"kept = values.clone(), offsets.clone(); {change}; return kept; return values"
    write(raises(code, "") + HEAD + CLASS.replace("return values", kept) + HOOK)
    judge(name="acme.same")
