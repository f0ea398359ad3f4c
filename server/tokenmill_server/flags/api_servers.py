"""How many API servers a server has when nobody says.

One API server keeps up with any engine core (4 to 7 us of CPU per streamed token), but a burst of requests waits in
one queue then: with a 1B model on 16 cores, 256 streams had their first token after 594 ms (p99) from one server and
after 159 ms from four, at the same throughput. So there are several where cores are to spare.
"""

_CPUS_PER_SERVER = 4
_SERVERS_PER_ENGINE = 4


def default_api_servers(num_cpus: int, num_engines: int, computes_on_cpu: bool) -> int:
    """One for every four CPUs, at most four per engine core, at least one. Engine cores that compute on the CPU need
    all of it: they get one API server together. A kind of model that wants fewer, for example because each API server
    would hold a cache of its own, is for the caller to see to: it knows the model."""
    if computes_on_cpu:
        return 1
    return max(1, min(num_cpus // _CPUS_PER_SERVER, num_engines * _SERVERS_PER_ENGINE))
