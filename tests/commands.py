"""Commands of ``recd`` in this process."""

from __future__ import annotations

from collections.abc import Mapping

from click.testing import CliRunner, Result

from recd_plugins.cli import main


def invoke(*arguments: object, env: Mapping[str, str | None] | None = None) -> Result:
    """Run ``recd`` and return what it came to. Exceptions that it does not handle fail the test."""
    result = CliRunner(env=env).invoke(main, [str(each) for each in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def recd(*arguments: object) -> str:
    """Run ``recd``, which has to succeed, and return its output."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*arguments: object, code: int = 1) -> str:
    """Run ``recd``, which has to exit with ``code``, and return its output without line breaks."""
    result = invoke(*arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())
