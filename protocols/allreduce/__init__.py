"""The data phase of a round: its plan, and the reduce-scatter and all-gather that follow from it."""
