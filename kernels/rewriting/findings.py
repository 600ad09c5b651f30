"""Findings: what a rewrite found and left as it is written, and near misses; computed on demand.

A call of fuse looks only for kernels that may pay. Reports look for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from torchard.functional.programs.program import Program
from torchard.functional.programs.records import Records
from torchard.functional.programs.tagging import forget
from torchard.functional.programs.tags import USE
from torchard.kernels.rewriting.fused_loss_grad import let_go_of_losses
from torchard.kernels.rewriting.near_misses import Misses
from torchard.kernels.rewriting.report import Missed, Use
from torchard.kernels.rewriting.search import Group, Request, Search
from torchard.kernels.rewriting.worth import Profitability, moves_less

__all__ = ["Findings"]


@dataclass
class Findings:
    """What one rewrite found and left.

    Args:
        before: the program before the rewrite.
        request: its request.
        gone: the names of the nodes that kernels replaced.
        used: the names of the kernels.
        reasons: by the name of its first result, why a kernel was not used.
        refused: the occurrences that could not be replaced, if all kernels were looked for.
    """

    before: Program
    request: Request
    gone: frozenset[str]
    used: frozenset[str]
    reasons: dict[str, str]
    refused: list[Missed]

    @staticmethod
    def of(before: Program, request: Request, search: Search) -> Findings:
        """The findings of a search that was carried out."""
        erased = search.replacer.erased
        refused = [miss for node, miss in search.refused if node not in erased] + search.stopped
        gone = frozenset(node.name for node in erased)
        return Findings(before, request, gone, frozenset(search.used), search.reasons, refused)

    def written(self) -> Records:
        """What kernels could compute, and is left as it is written, each with the reason."""
        if not self.request.by_time:
            return Records()
        program, groups, _ = self._all
        profitability = Profitability(program)
        for node in program.calls:  # what earlier rewrites used is listed with the program itself
            forget(node, USE)
        for group in groups:
            for (kernel, _), part in zip(group.members, group.plan.parts, strict=True):
                first = part.firsts[0]
                why = self.reasons.get(first.name) or profitability.why_not_tried(kernel.of or kernel)
                why = why or profitability.why_as_written(group.members, group.plan)
                # What was tried overlaps it, such as a kernel that has its operations and more.
                why = why or "in another trial"
                USE.set(first, Use.of(kernel.name, f"as written ({why})", part))
        return program.kernels

    def missed(self) -> list[Missed]:
        """Occurrences that could not be replaced, then near misses, in program order."""
        _, groups, refused = self._all
        written = {node.name for group in groups for node in group.plan.gone}
        used = self.used | {kernel.name for group in groups for kernel, _ in group.members}
        kernels, concerns = self.request.looked_for, self.request.concerns
        return Misses(self.before, kernels, concerns, refused, used, self.gone | written)()

    @cached_property
    def _all(self) -> tuple[Program, list[Group], list[Missed]]:
        """A copy of the program, its occurrences that were not replaced, and those that cannot be."""
        if not self.request.by_time:
            return self.before, [], self.refused
        # Without what earlier rewrites left, which the program lists, too.
        program = replace(self.before.copy(), written=())
        let_go_of_losses(program)
        search = Search(program, self.request.of_all)
        found = []
        for group in search.apart():
            if self._is_left(group.plan.results):
                if moves_less(group.plan):
                    found.append(group)
                else:
                    search.refuse(group)
        refused = [miss for node, miss in search.refused if node.name not in self.gone]
        return program, found, refused + search.stopped

    def _is_left(self, results: list[fx.Node]) -> bool:
        return self.gone.isdisjoint(node.name for node in results)
