"""Every environment variable is read, checked and documented; enums take strings at the door."""

from __future__ import annotations

import pathlib
import re
import warnings

import pytest

from fusewright import config
from fusewright.config import VARIABLES, Effort, Numerics, Verify, read_settings, to_enum, writable_folder
from fusewright.errors import CacheFolderError, UnknownNameError, UserInputError

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults() -> None:
    assert read_settings() == config.Settings(
        disabled=False, cache_dir=pathlib.Path.home() / ".cache" / "fusewright", dump_dir=None,
        skip_passes=frozenset(), strict=False, verify=Verify.FIRST_CALL, store=None, cost=True,
    )  # fmt: skip


SET: dict[str, tuple[str, str, object]] = {
    "FUSEWRIGHT_DISABLE": ("1", "disabled", True),
    "FUSEWRIGHT_CACHE_DIR": ("~/elsewhere", "cache_dir", pathlib.Path.home() / "elsewhere"),
    "FUSEWRIGHT_DUMP": ("~/dump", "dump_dir", pathlib.Path.home() / "dump"),
    "FUSEWRIGHT_SKIP_PASSES": (" fuse_attention, ,canonicalize,", "skip_passes", {"fuse_attention", "canonicalize"}),
    "FUSEWRIGHT_STRICT": ("1", "strict", True),
    "FUSEWRIGHT_VERIFY": ("always", "verify", Verify.ALWAYS),
    "FUSEWRIGHT_COST": ("off", "cost", False),
    "FUSEWRIGHT_STORE": ("postgresql://host/db", "store", "postgresql://host/db"),
}


def test_every_variable_is_tested() -> None:
    assert set(SET) == set(VARIABLES)


@pytest.mark.parametrize("name", SET)
def test_a_variable_sets_its_field_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_settings()
    value, attribute, expected = SET[name]
    monkeypatch.setenv(name, value)
    after = read_settings()
    assert getattr(after, attribute) == expected
    changed = [f for f in config.Settings.__dataclass_fields__ if getattr(after, f) != getattr(before, f)]
    assert changed == [attribute]


@pytest.mark.parametrize("name", VARIABLES)
def test_an_empty_variable_counts_as_not_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_settings()
    monkeypatch.setenv(name, "")
    assert read_settings() == before


def test_cost_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_settings().cost
    monkeypatch.setenv("FUSEWRIGHT_COST", "0")
    with pytest.raises(UserInputError, match="FUSEWRIGHT_COST must be on or off, not '0'"):
        read_settings()


@pytest.mark.parametrize("name", ["FUSEWRIGHT_DISABLE", "FUSEWRIGHT_STRICT"])
@pytest.mark.parametrize("value", ["yes", "true", "2", " 1"])
def test_a_flag_is_0_or_1(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "0")
    read_settings()
    monkeypatch.setenv(name, value)
    with pytest.raises(UserInputError, match=rf"{name} must be 0 or 1, not {value!r}"):
        read_settings()


def test_a_wrong_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_VERIFY", "first-call")
    with pytest.raises(UnknownNameError, match=r"FUSEWRIGHT_VERIFY 'first-call'\. Did you mean 'first_call'\?"):
        read_settings()


@pytest.mark.parametrize(
    ("name", "meant"), [("FUSEWRIGHT_DISABEL", "FUSEWRIGHT_DISABLE"), ("FUSEWRIGHT_CACHE", "FUSEWRIGHT_CACHE_DIR")]
)
def test_an_unknown_variable_warns(name: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.warns(UserWarning, match=rf"{name} is not known.*Did you mean '{meant}'\?") as caught:
        assert not read_settings().disabled
    assert caught[0].filename == __file__, "the warning points at who reads the settings"


def test_other_variables_do_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHTX", "1")
    monkeypatch.setenv("MY_FUSEWRIGHT_THING", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_settings().store is None


def test_to_enum() -> None:
    assert to_enum(Numerics, "exact", "numerics") is Numerics.EXACT
    assert to_enum(Effort, Effort.FULL, "effort") is Effort.FULL
    for wrong in ("exat", "EXACT", None, 1):
        with pytest.raises(UnknownNameError, match=r"unknown numerics .*Known: exact, lossy, reassociated"):
            to_enum(Numerics, wrong, "numerics")


def test_tiers_are_ordered() -> None:
    allowed = {tier: [other.value for other in Numerics if tier.allows(other)] for tier in Numerics}
    assert allowed == {
        Numerics.EXACT: ["exact"],
        Numerics.REASSOCIATED: ["exact", "reassociated"],
        Numerics.LOSSY: ["exact", "reassociated", "lossy"],
    }


def test_a_folder_that_cannot_be_made(tmp_path: pathlib.Path) -> None:
    assert writable_folder(tmp_path / "new" / "one", "FUSEWRIGHT_CACHE_DIR").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFolderError, match=r"file/x \(Not a directory\); set FUSEWRIGHT_CACHE_DIR"):
        writable_folder(tmp_path / "file" / "x", "FUSEWRIGHT_CACHE_DIR")


def test_the_documentation_lists_every_variable() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(FUSEWRIGHT_\w+)` \| .+? \| (.*?) \|$", text, re.MULTILINE)
    assert rows == list(VARIABLES.items())
