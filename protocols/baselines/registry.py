"""The baselines by name: well-known ways to train together, with which the other protocols are compared.

They are made for clusters and local networks: one lost member costs all members the round. They promise only to fail
cleanly. A round without a result ends by its deadline and names the peer at fault. Nothing hangs, and no task or stream
is left over. Members believe each other's tokens, vectors and round numbers.

The peers average states (parameters and momentum after each peer's own outer step), weighted by tokens, in fp32, or in
fp16 if that is the run's codec. An outer step of SGD is linear: from equal states, the mean of the stepped states is
the step by the mean gradient. With one inner step of SGD at rate 1 in each round, `data_parallel` therefore equals an
all-reduce of gradients and one step of SGD, with or without momentum. An outer AdamW step is not linear.
`benchmarks.laboratory.data_parallel` has that case: it averages gradients before the step.

    data_parallel             each member reduces one part: reduce-scatter and all-gather in one hop each
    ring                      the same in a ring: less memory and fewer streams, but 2 (N - 1) steps
    parameter_server          the member with the first peer id reduces everything
    parameter_server_async    the server applies each update when it arrives, without a barrier
                              (`protocols.baselines.async_parameter_server`)
"""

from __future__ import annotations

from functools import partial

from protocols.base import Host, Settings
from protocols.baselines.async_parameter_server import AsyncParameterServer
from protocols.baselines.ring import Ring
from protocols.baselines.scatter_reduce import ScatterReduce
from protocols.baselines.synchronous import SynchronousAverager


def data_parallel(host: Host, settings: Settings) -> SynchronousAverager:
    """Synchronous data-parallel training: an all-reduce among all live peers."""
    return SynchronousAverager(host, settings, "starling/data-parallel/1", ScatterReduce)


def ring(host: Host, settings: Settings) -> SynchronousAverager:
    """A ring all-reduce among all live peers."""
    return SynchronousAverager(host, settings, "starling/ring/1", Ring)


def parameter_server(host: Host, settings: Settings) -> SynchronousAverager:
    """A parameter server with a barrier: one member averages for all (Li et al. 2014). Its link carries 2 (N − 1) S."""
    return SynchronousAverager(host, settings, "starling/parameter-server/1", partial(ScatterReduce, reducers=(0,)))


def parameter_server_async(host: Host, settings: Settings) -> AsyncParameterServer:
    """A parameter server that applies each update when it arrives, without momentum of its own.

    The momentum is that of the peers' outer steps. `AsyncParameterServer` can apply a delayed one instead.
    """
    return AsyncParameterServer(host, settings)
