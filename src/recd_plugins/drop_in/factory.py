"""A model that is named on the command line, by the function that makes it."""

from __future__ import annotations

import importlib
import os
import sys

from torch import nn

from recd_plugins.errors import SetupError
from recd_plugins.words import did_you_mean


def model_of(name: str) -> nn.Module:
    """The model that ``module:function`` returns; modules of the current directory are found.

    Raises:
        SetupError: there is no such module or function, it raises something, or it returns
            something else.
    """
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise SetupError(f"--model {name}: expected MODULE:FACTORY, as in trainer:build_model")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise SetupError(
            f"--model {name}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    factory = getattr(module, function_name, None)
    if not callable(factory):
        known = [each for each in vars(module) if callable(getattr(module, each))]
        raise SetupError(
            f"--model {name}: {module_name} has no function {function_name}"
            + did_you_mean(function_name, known)
        )
    try:
        model = factory()
    except Exception as error:
        raise SetupError(
            f"--model {name}: {function_name}() failed: {type(error).__name__}: {error}; it is "
            "called without arguments"
        ) from error
    if not isinstance(model, nn.Module):
        raise SetupError(f"--model {name}: {function_name}() returned {model!r:.200}, no module")
    return model
