"""What must hold of rounds while members rest or are away."""

from __future__ import annotations

from collections.abc import Iterator

from node.outer.outer_loop import OuterLoop
from protocols.butterfly.averager import Butterfly
from tests.support.checkers import Report, Violation


def called_early(outer_loop: OuterLoop | None, report: Report) -> Iterator[Violation]:
    """A round with a mean was called because work was complete, or because a member left; never because one paused."""
    averager = getattr(outer_loop, "averager", None)
    session = averager._round if isinstance(averager, Butterfly) else None
    if session is None or session.head.key.lineage.hex() != report["parent"] or report["outcome"] != "committed":
        return
    resolved, roster = session.call.resolved, session.head.roster
    offers = resolved.plan.offers if resolved else ()
    leave = {offer.member for offer in offers if offer.leaving} >= set(roster)
    if offers and not leave and not any(offer.complete for offer in offers):
        what = f"called with {[offer.tokens for offer in offers]} tokens, none of them complete"
        yield Violation("early", report["peer"], report["round"], what)
