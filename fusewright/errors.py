"""The exception tree a user can meet; our own bugs are assertions instead.

FusewrightError
+-- UserInputError (also ValueError)      an argument is wrong; nothing was changed
|   +-- DimsError                         inputs contradict `dims` or `buckets`
|   +-- UnknownNameError                  pass, lowering, option or variable not known ("did you mean")
+-- StackError                            the machine or the stack does not fit
|   +-- UnsupportedTorchError             torch is older than the oldest supported
|   +-- CacheFolderError                  a folder cannot be written
|   +-- StoreVersionError                 the store was written by another version
+-- FallbackError                         strict=True and something would have run slower than asked
|   +-- RecompileLimitError               Dynamo gave a frame up
|   +-- PassFailedError                   a pass raised or left an illegal graph
|   +-- VerificationError                 a lowering disagrees with eager
+-- CaptureError                          the step cannot be captured as one graph (TrainStep)
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FusewrightError(Exception):
    """Root of every error that fusewright raises on purpose."""


class UserInputError(FusewrightError, ValueError):
    """An argument is wrong. The message names the argument and the remedy; the model is left as it was."""


class DimsError(UserInputError):
    """Inputs contradict `dims` or `buckets`."""


class UnknownNameError(UserInputError):
    """A name is not known. Build it with `unknown_name`, which adds the nearest known one."""


class StackError(FusewrightError):
    """The machine or the software stack does not fit."""


class UnsupportedTorchError(StackError):
    """The installed torch is not supported."""


class CacheFolderError(StackError):
    """A cache folder cannot be made or written."""


class StoreVersionError(StackError):
    """A tuning store was written by another version of its schema."""


class FallbackError(FusewrightError):
    """Raised under `strict=True` where the default would count a fallback and go on."""


class RecompileLimitError(FallbackError):
    """Dynamo reached its recompile limit and would run the frame eagerly from now on."""


class PassFailedError(FallbackError):
    """A pass raised, or left a graph that breaks the graph rules."""


class VerificationError(FallbackError):
    """A lowered graph disagrees with eager beyond the accuracy rule."""


class CaptureError(FusewrightError):
    """A whole step cannot be captured as one graph."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the nearest known name, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def unknown_name(what: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """Make the error for an unknown `name` of kind `what`, listing what is known."""
    names = sorted(known)
    return UnknownNameError(f"unknown {what} {name!r}.{did_you_mean(name, names)} Known: {', '.join(names) or 'none'}.")
