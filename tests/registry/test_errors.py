"""Everything a user can get wrong in a registry file, and what is said about it."""

import pytest

from recd_plugins import load_registry
from recd_plugins.config.run_config import check_dataset
from recd_plugins.runtime.errors import RegistryError

HEAD = """\
version: 1
dataset: {use: acme.data, options: {path: clicks}}
converter: {use: acme.plain}
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "r.yaml: the file is empty"),
        ("- a\n- b\n", "r.yaml:1: the file is not a mapping"),
        (
            HEAD + "cache: a: b\n",
            "r.yaml:4: the text is not valid YAML: mapping values are not allowed here",
        ),
        (HEAD + "cache: *nowhere\n", "r.yaml:4: the text is not valid YAML: found undefined alias"),
        (HEAD + "cache: " + "[" * 1000, "r.yaml: the text is not valid YAML"),
        (HEAD.encode() + b"# caf\xe9\n", "r.yaml: the file is not UTF-8"),
        (HEAD + "version: 1\n", "r.yaml:4 version: the key is a duplicate of line 1"),
        (
            HEAD + "cache: !!python/object/apply:os.system ['true']\n",
            "r.yaml:4 cache: YAML tag 'tag:yaml.org,2002:python/object/apply:os.sys",
        ),
        (HEAD + "training: {<<: {steps: 1}}\n", "merge key << is not allowed"),
        (HEAD + "1: 2\n", "r.yaml:4: this key is not a string"),
        (HEAD + "training: {seed: !!int abc}\n", "r.yaml:4 training.seed: 'abc' is not a YAML int"),
    ],
)
def test_what_is_no_plain_yaml(problems, text, expected):
    (problem,) = problems(text)
    assert expected in problem


def test_a_missing_file(tmp_path):
    message = r"missing\.yaml: the file cannot be read: No such file"
    with pytest.raises(RegistryError, match=message):
        load_registry(tmp_path / "missing.yaml")


SHAPES = {
    "cach: []": "r.yaml:4 cach: unknown key. Did you mean 'cache'?",
    "zebra: []": "r.yaml:4 zebra: unknown key. Use one of these: 'version', 'dataset",
    "cache:": "r.yaml:4 cache: expected a list, but the value is empty. Remove the key",
    "cache: [acme.hot]": "r.yaml:4 cache[0]: input should be a mapping",
    "training:\n  optimizer: lamb": (
        "r.yaml:5 training.optimizer: input should be 'sgd' or 'rowwise_adagrad', got 'lamb'"
    ),
    "training:\n  optimizer: adam": (
        "r.yaml:5 training.optimizer: 'adam' is not 'rowwise_adagrad' or 'sgd', which work on "
        "all devices. For adam in embedding tables (needs CUDA), set optimizers: [{use: torch"
    ),
    "training:\n  checkpoint:\n    evry: 3": (
        "r.yaml:6 training.checkpoint.evry: unknown key. Did you mean 'every'?"
    ),
    "training: {checkpoint: {every: 5}}": (
        "r.yaml:4 training.checkpoint: checkpoint.every is set, but neither checkpoint.runs"
    ),
    "training: {ranks: true}": "training.ranks: input should be a valid integer",
    "training:\n  ranks: 4\n  ranks_per_node: 3": (
        "r.yaml:6 training.ranks_per_node: training.ranks is 4, which is not a multiple of 3"
    ),
    "model: {tables: {t_a: {rows: 5}}}": (
        "model.tables.t_a.rows: unknown key. Use one of these: 'num_embeddings"
    ),
    "model:\n  embedding_dim: 6": (
        "r.yaml:5 model.embedding_dim: input should be a multiple of 4, got 6"
    ),
    "pooling:\n  - use: acme.max\n    features: []": (
        "r.yaml:6 pooling[0].features: list should have at least 1 item"
    ),
    "pooling: [{use: acme.max, features: user}]": (
        "r.yaml:4 pooling[0].features: expected a list, got 'user'"
    ),
    "pooling:\n  - use: acme.max": "r.yaml:5 pooling[0].features: this required key is missing",
    "pooling: [{use: acme.max, tables: [a], features: [a]}]": (
        "pooling[0].tables: unknown key. Use one of these: 'use', 'options', 'features"
    ),
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("version: 2\n" + HEAD[11:], "r.yaml:1 version: input should be 1, got 2"),
        ("dataset: 5\n", "r.yaml:1 dataset: input should be a mapping of keys to values, got 5"),
        *((f"{HEAD}{text}\n", expected) for text, expected in SHAPES.items()),
    ],
)
def test_a_wrong_shape(problems, text, expected):
    assert any(expected in problem for problem in problems(text)), problems(text)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (
            "acme.kep",
            "r.yaml:5 preprocessing[0].use: no preprocessing plugin is named 'acme.kep'. "
            "Did you mean 'acme.keep'?",
        ),
        ("acme.hot", "5 preprocessing[0].use: 'acme.hot' is a cache plugin. Move this entry to"),
        ("acme.xyzzy", "named 'acme.xyzzy'. Use one of these: 'acme.keep"),
        ("other.thing", "install the package of 'other.thing"),
        ("5", "preprocessing[0].use: input should be a valid string, got 5"),
        (
            "acme.keep, options: {bukets: 5}",
            "options.bukets: unknown option of 'acme.keep'. Did you mean 'buckets'?",
        ),
        (
            "acme.keep, options: {buckets: 0}",
            "preprocessing[0].options.buckets: input should be greater than 0, got 0",
        ),
        (
            "acme.keep, options: {limits: [{lowr: 0}]}",
            "preprocessing[0].options.limits[0].lowr: unknown option of 'acme.keep'. "
            "Did you mean 'lower'?",
        ),
        (
            "acme.keep, options: {buckets: 13}",
            "r.yaml:5 preprocessing[0].options: option 'buckets' is 13, an unlucky number. Use 14",
        ),
    ],
)
def test_a_wrong_plugin_or_option(problems, entry, expected):
    (problem,) = problems(f"{HEAD}preprocessing:\n  - {{use: {entry}, features: [a]}}\n")
    assert expected in problem


def test_everything_is_told_at_once_in_the_order_of_lines(problems):
    text = """\
version: 1
dataset:
  use: acme.data
  options:
    rows: -1
converter: {use: acme.plane}
preprocessing:
  - {use: acme.keep, features: [a], options: {bucket: 1}}
  - {use: acme.max, features: [a]}
shardings: []
training: {ranks: 0}
"""
    assert [problem.partition(": ")[0] for problem in problems(text)] == [
        "r.yaml:4 dataset.options.path",
        "r.yaml:5 dataset.options.rows",
        "r.yaml:6 converter.use",
        "r.yaml:8 preprocessing[0].options.bucket",
        "r.yaml:9 preprocessing[1].use",
        "r.yaml:10 shardings",
        "r.yaml:11 training.ranks",
    ]


def test_mistakes_of_a_dataset_have_lines(load, monkeypatch):
    registry = load(HEAD)
    found = [(("path",), "the path is not a URL. Use a URL")]
    monkeypatch.setattr(type(registry.dataset), "mistakes", lambda _: found)
    with pytest.raises(RegistryError, match=r":2 dataset\.options\.path: the path is not a URL"):
        check_dataset(registry)
