"""What the protocols of this package are compared with: the literature's ways to train together, by their names.

They are small, and made for laboratories and local networks: one lost member costs everybody the round. They fail
cleanly, which is all that is promised: a round without a result ends by its deadline and says whom it was for; nothing
hangs and nothing is left over. Members are believed what they say: their tokens, their vectors, which round it is.

They average states, (parameters, momentum) after each peer's own outer step, weighted by tokens, in fp32, or in fp16
where that is the run's codec. An outer step of SGD is linear: the mean of stepped states, from equal states, is the
step by the mean gradient. So with one inner step of SGD at rate 1 a round, `data_parallel` is the all-reduce of
gradients with one step of SGD, with or without momentum, after it. An outer AdamW is not linear: that one is in
`benchmarks.protocols`, where gradients are averaged before the step.

    data_parallel             each member reduces one part, reduce-scatter and all-gather in one hop each
    ring                      the same round a ring: less memory and fewer streams, 2 (N - 1) steps
    parameter_server          the first member by its id reduces everything
    parameter_server_async    it applies what comes in when it comes in, without any barrier
    (`protocols.baselines.async_parameter_server`)
"""

from __future__ import annotations

from protocols.base import Host, Settings
from protocols.baselines.async_parameter_server import AsyncParameterServer
from protocols.baselines.ring import Ring
from protocols.baselines.scatter_reduce import ScatterReduce
from protocols.baselines.synchronous import SynchronousAverager
from protocols.baselines.synchronous_round import SynchronousRound


def data_parallel(host: Host, settings: Settings) -> SynchronousAverager:
    """Synchronous data parallel training: an all-reduce among all who are live."""
    return SynchronousAverager(host, settings, "starling/data-parallel/1", _all_reduce)


def ring(host: Host, settings: Settings) -> SynchronousAverager:
    """Ring all-reduce among all who are live."""
    return SynchronousAverager(host, settings, "starling/ring/1", Ring)


def parameter_server(host: Host, settings: Settings) -> SynchronousAverager:
    """Everything goes to one member and comes back from there: 2 (N - 1) S through one link (Li et al. 2014)."""
    return SynchronousAverager(host, settings, "starling/parameter-server/1", _through_the_first)


def parameter_server_async(host: Host, settings: Settings) -> AsyncParameterServer:
    """Apply each update as it arrives. The peers' outer step has the momentum; `AsyncParameterServer` has a delayed
    one."""
    return AsyncParameterServer(host, settings)


def _all_reduce(meeting: SynchronousRound) -> ScatterReduce:
    return ScatterReduce(meeting, range(len(meeting.peers)))


def _through_the_first(meeting: SynchronousRound) -> ScatterReduce:
    return ScatterReduce(meeting, (0,))
