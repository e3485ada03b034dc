"""docs/results/compilers.json: what the compilers made of every kind of kernel, and whether that became worse."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from compilers.chosen import DECODE
from compilers.toolchains import Figures

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "results" / "compilers.json"
COLUMNS = ("registers", "spilled", "scratch_bytes", "local_bytes", "occupancy")

Kinds = dict[str, Figures | None]
"""By what a kernel does (Program.kind); None where the compiler gives no figures."""


@dataclass
class Table:
    """versions: of the compilers, by vendor. uses: of each kind, "decode" and others. programs: how many a GPU compiles
    for all models, by target. firsts, worst: figures of each kind by target, of its first program (what a quick run
    compiles) and the worst of all that were compiled. digests: of the first programs, by target: a compiler makes the
    same of the same text again, so that a run compiles those alone which are no longer what they were.
    """

    versions: dict[str, str] = field(default_factory=dict)
    uses: dict[str, str] = field(default_factory=dict)
    programs: dict[str, int] = field(default_factory=dict)
    firsts: dict[str, Kinds] = field(default_factory=dict)
    worst: dict[str, Kinds] = field(default_factory=dict)
    digests: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = TABLE) -> Table:
        stored = json.loads(path.read_text(encoding="utf-8"))
        assert stored["columns"] == list(COLUMNS), f"{path} has columns {stored['columns']}"
        firsts, others = (
            {
                target: {kind: Figures(*row) if row else None for kind, row in rows.items()}
                for target, rows in stored[section].items()
            }
            for section in ("kernels", "worst")
        )
        worst = {target: {**rows, **others.get(target, {})} for target, rows in firsts.items()}
        digests = {target: set(text.split()) for target, text in stored["digests"].items()}
        return cls(stored["compilers"], stored["uses"], stored["programs"], firsts, worst, digests)

    def write(self, path: Path = TABLE) -> None:
        """A line for each kind, so that a change of one is a line of a diff. The worst stands where it says more."""
        sections: dict[str, dict[str, dict[str, Any]]] = {"kernels": {}, "worst": {}}
        for target, rows in self.firsts.items():
            worst = self.worst.get(target, {})
            sections["kernels"][target] = {kind: _row(row) for kind, row in rows.items()}
            sections["worst"][target] = {
                kind: _row(worst[kind])
                for kind, row in rows.items()
                if row and (largest := worst.get(kind)) and worsened(row, largest)
            }
        digests = {target: " ".join(sorted(of_target)) for target, of_target in self.digests.items()}
        head: dict[str, Any] = {"compilers": self.versions, "programs": self.programs, "digests": digests}
        head["columns"] = COLUMNS
        text = json.dumps(head, indent=1)[:-2] + ',\n "uses": ' + _lines(self.uses, 1)
        for name, targets in sections.items():
            rows = [f'  "{target}": {_lines(of_target, 2)}' for target, of_target in targets.items()]
            text += f',\n "{name}": {{\n' + ",\n".join(rows) + "\n }"
        path.write_text(text + "\n}\n", encoding="utf-8")

    def add(self, target: str, kind: str, use: str, figures: Figures | None) -> None:
        """Notes a kernel, in the order in which a device's programs are listed."""
        self.uses[kind] = use
        self.firsts.setdefault(target, {}).setdefault(kind, figures)
        before = self.worst.setdefault(target, {}).setdefault(kind, figures)
        if before and figures:
            self.worst[target][kind] = worst([before, figures])

    def forget(self, targets: AbstractSet[str]) -> None:
        """Keeps the kinds of these targets and drops their figures: another version of a compiler has others."""
        for target in targets & set(self.firsts):
            self.firsts[target] = self.worst[target] = dict.fromkeys(self.firsts[target])

    def take(self, newer: Table) -> None:
        """Replaces the rows of kinds that a newer table has, and adds its digests."""
        self.uses |= newer.uses
        self.programs |= newer.programs
        for mine, theirs in (self.firsts, newer.firsts), (self.worst, newer.worst):
            for target, rows in newer.firsts.items():
                mine.setdefault(target, {}).update({kind: theirs[target][kind] for kind in rows})
        for target, digests in newer.digests.items():
            self.digests.setdefault(target, set()).update(digests)

    def keep_worst(self, known: Table) -> None:
        """Takes over what is known of all models, of kinds whose first program is what it was."""
        for target, rows in self.firsts.items():
            for kind, row in rows.items():
                before = known.worst.get(target, {}).get(kind)
                if row and before and row == known.firsts[target].get(kind):
                    self.worst[target][kind] = worst([row, before])


def _row(row: Figures | None) -> list[int]:
    return list(astuple(row)) if row else []


def _lines(values: dict[str, Any], depth: int) -> str:
    rows = ",\n".join(
        f"{' ' * (depth + 1)}{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(values.items())
    )
    return "{\n" + rows + "\n" + " " * depth + "}" if values else "{}"


def worst(rows: Iterable[Figures | None]) -> Figures:
    """The largest of everything, and the least occupancy."""
    values = list(zip(*(astuple(row) for row in rows if row), strict=True))
    return Figures(*(max(column) for column in values[:-1]), min(values[-1]))


def worsened(known: Figures, found: Figures) -> str | None:
    """In what a kernel became worse than the table says; None: in nothing that matters."""
    changes = [
        f"{what} {before} -> {after}"
        for what, before, after in (
            ("registers spilled", known.spilled, found.spilled),
            ("bytes of private memory", known.scratch_bytes, found.scratch_bytes),
        )
        if after > before
    ]
    if found.occupancy < known.occupancy:
        changes.append(f"occupancy {known.occupancy} -> {found.occupancy}")
    return ", ".join(changes) or None


def spills_in_decode(use: str, row: Figures) -> bool:
    return use == DECODE and row.spilled > 0


def problems(known: Table, found: Table, kinds: Mapping[str, AbstractSet[str]], *, everything: bool) -> list[str]:
    """What keeps the check from passing, in sentences.

    found: what was compiled now. kinds: all that each target would run. everything: every program was compiled.
    """
    said = []
    for target, rows in found.worst.items():
        said += [
            f"{target}: {kind} spills {row.spilled} registers, and no kernel of the decode path may"
            for kind, row in rows.items()
            if row and spills_in_decode(found.uses[kind], row)
        ]
    before, now = (known.worst, found.worst) if everything else (known.firsts, found.firsts)
    for target, names in kinds.items():
        rows = before.get(target, {})
        said += [f"{target}: {kind} is not in the table" for kind in sorted(names - set(rows))]
        said += [f"{target}: {kind} is in the table, and no device runs it" for kind in sorted(set(rows) - names)]
        for kind, row in now.get(target, {}).items():
            recorded = rows.get(kind)
            if row and recorded and (change := worsened(recorded, row)):
                said.append(f"{target}: {kind} became worse: {change}")
    return said
