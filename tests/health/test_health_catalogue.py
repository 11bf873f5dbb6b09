"""The XID catalogue: every code, and what the loader refuses."""

import pytest

from gpunode.health.catalogue import (
    Catalogue,
    CatalogueError,
    XidClass,
    builtin_catalogue,
    load_catalogue,
    parse_catalogue,
    parse_overrides,
)
from gpunode.model.health import Action, Clear, Level

# Written by hand from the public catalogue, independently of the data file. Whatever is in none of these
# sets asks for support: class host, action inspect.
APPLICATION = {8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89}
APPLICATION |= {94, 96, 97, 98, 139, *range(99, 106), *range(126, 136)}
IGNORE = {14, 37, 38, 43, 44, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161}
IGNORE |= {162, 164, 174, 176}
RESET = {46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158, 167, 169, 173}
WORKFLOW = {
    45: Action.NONE,
    48: Action.RESET_GPU,
    74: Action.RESET_GPU,
    **dict.fromkeys(range(144, 151), Action.INSPECT),
    154: Action.NONE,
    159: Action.INSPECT,
    171: Action.RESET_GPU,
    172: Action.RESET_GPU,
}
RESTART_HOST = {79, 151}
FOLLOWED_BY_154 = {48, 62, 63, 64, 74, 79, 94, 95, 109, 110, 120, 136, 143, *range(144, 151)}
FOLLOWED_BY_154 |= {155, 156, 158, 159, 160, 161}


def expected(code: int) -> tuple[XidClass, Action]:
    if code in APPLICATION:
        return XidClass.APPLICATION, Action.RESTART_APP
    if code in IGNORE:
        return XidClass.IGNORE, Action.NONE
    if code in RESET:
        return XidClass.RESET, Action.RESET_GPU
    if code in WORKFLOW:
        return XidClass.WORKFLOW, WORKFLOW[code]
    return XidClass.HOST, Action.RESTART_HOST if code in RESTART_HOST else Action.INSPECT


@pytest.mark.parametrize("code", range(1, 177))
def test_every_code_has_its_class_and_action(code: int) -> None:
    entry = builtin_catalogue().xids[code]
    assert (entry.class_, entry.action) == expected(code)
    assert entry.mnemonic and entry.meaning and entry.source in ("catalogue", "driver", "judgement")
    assert entry.code == code


def test_the_catalogue_ends_at_176() -> None:
    assert sorted(builtin_catalogue().xids) == list(range(1, 177))


@pytest.mark.parametrize("code", range(1, 177))
def test_which_codes_the_drivers_verdict_follows(code: int) -> None:
    entry = builtin_catalogue().of(code)
    assert (entry.follows_154 is not None) == (code in FOLLOWED_BY_154)
    assert (Clear.VERDICT in entry.clears) == (entry.follows_154 is not None)


@pytest.mark.parametrize(
    ("codes", "level"),
    [
        ((13, 31, 43, 45, 63, 94, 154), Level.HEALTHY),
        ((48, 62, 64, 74, 79, 95, 109, 119, 120, 140), Level.UNHEALTHY),
        ((1, 54, 78, 142), Level.DEGRADED),
    ],
)
def test_disputed_codes(codes: tuple[int, ...], level: Level) -> None:
    assert {builtin_catalogue().of(code).level for code in codes} == {level}


@pytest.mark.parametrize("code", range(1, 177))
def test_reboot_and_reset_end_every_code(code: int) -> None:
    assert {Clear.REBOOT, Clear.RESET} <= builtin_catalogue().of(code).clears


def test_a_code_from_the_future_is_inspected_not_ignored() -> None:
    assert builtin_catalogue().of(999).level is Level.DEGRADED


ROW = "{code: 1, mnemonic: A, class: ignore, action: none, meaning: m}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"xids: [{ROW}, {ROW}]", "more than once"),
        (f"xids: [{ROW}, {ROW.replace('code: 1', 'code: 3')}]", r"missing: \[2\]"),
        (f"xids: [{ROW.replace('code: 1', 'code: 0')}]", "without gaps"),
        ("xids: []", "without gaps"),
        (f"xids: [{ROW.replace('ignore', 'fatal')}]", "fatal"),
        (f"xids: [{ROW.replace('none', 'explode')}]", "explode"),
        (f"xids: [{ROW.replace('mnemonic', 'nickname')}]", "nickname"),
        (f"xids: [{ROW}]\nmore: 1", "more"),
        ("xids: 3", "array"),
        ("[", "not YAML"),
        ("[" * 5000, "not YAML"),
        ("", "object"),
        ("x" * (1 << 21), "larger"),
    ],
)
def test_a_wrong_catalogue_is_refused(text: str, says: str) -> None:
    with pytest.raises(CatalogueError, match=says):
        parse_catalogue(text, "f.yaml")


def test_overrides_change_only_what_they_name(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("xids:\n- {code: 94, class: reset, action: reset-gpu}\n- {code: 43, meaning: mine}\n")
    mine, base = load_catalogue(file), builtin_catalogue()
    assert mine.of(94).level is Level.UNHEALTHY
    assert mine.of(94).meaning == base.of(94).meaning
    assert (mine.of(43).action, mine.of(43).meaning) == (base.of(43).action, "mine")
    assert {c: e for c, e in mine.xids.items() if c not in (43, 94)} == {
        c: e for c, e in base.xids.items() if c not in (43, 94)
    }


def test_overrides_may_add_a_code_only_when_complete() -> None:
    added = "xids: [{code: 300, class: reset, action: reset-gpu, meaning: new}]"
    assert parse_overrides(added, builtin_catalogue()).of(300).level is Level.UNHEALTHY
    with pytest.raises(CatalogueError, match="code 300 is new"):
        parse_overrides("xids: [{code: 300, action: reset-gpu}]", builtin_catalogue())
    with pytest.raises(CatalogueError, match="more than once"):
        parse_overrides("xids: [{code: 94}, {code: 94}]", Catalogue({}))


def test_an_override_file_that_cannot_be_read_says_so(tmp_path) -> None:
    with pytest.raises(CatalogueError, match="cannot be read"):
        load_catalogue(tmp_path / "absent.yaml")
