"""The rows of the table of flags that say how many processes there are, and where they run."""

from tokenmill_server.flags.flag import Arity, EnvAlias, Flag, Group
from tokenmill_server.flags.parsers import boolean, integer, integer_list, one_of, text

_MAX_RANKS = 256
_MAX_WORKERS = 256
_EXECUTORS = one_of(
    "uni",
    "mp",
    refused={
        "ray": "the workers of an engine core are processes on its own machine, started without Ray",
        "external_launcher": "an engine core starts its workers itself",
    },
)

PARALLEL = (
    Flag(
        "api-server-count",
        Group.PARALLEL,
        integer(1, 256),
        None,
        "HTTP processes that share the port. Default on a GPU: one for every four CPUs, at most four per engine core "
        "that they serve; 1 on the CPU and with --data-parallel-external-lb",
        "server.api_server_count",
        metavar="N",
        short=("-asc",),
        offline=False,
    ),
    Flag(
        "data-parallel-size",
        Group.PARALLEL,
        integer(1, _MAX_RANKS),
        1,
        "Engine cores, each with a copy of the model; requests go where their prefix is cached, as far as load allows",
        "engine.data_parallel_size",
        metavar="N",
        short=("-dp",),
    ),
    Flag(
        "tensor-parallel-size",
        Group.PARALLEL,
        integer(1, _MAX_WORKERS),
        1,
        "Worker processes of each engine core that share one copy of the model: each has a part of every layer and of "
        "the KV cache, on a GPU of its own. The model's heads and feed-forward width must divide",
        "parallel.tensor_parallel_size",
        metavar="N",
        short=("-tp",),
    ),
    Flag(
        "pipeline-parallel-size",
        Group.PARALLEL,
        integer(1, _MAX_WORKERS),
        1,
        "Stages of each engine core's model, one after another: each has some of the layers, in --tensor-parallel-size "
        "worker processes",
        "parallel.pipeline_parallel_size",
        metavar="N",
        short=("-pp",),
    ),
    Flag(
        "pipeline-parallel-layers",
        Group.PARALLEL,
        integer_list(1),
        None,
        "Layers of each stage, such as 10,12,10. Default: as evenly as can be",
        "parallel.pipeline_layers",
        metavar="N,N,...",
        env=(EnvAlias("VLLM_PP_LAYER_PARTITION"),),
    ),
    Flag(
        "distributed-executor-backend",
        Group.PARALLEL,
        _EXECUTORS,
        None,
        "Where workers compute: uni (one, in the engine core's process) or mp (processes of their own). Default: mp "
        "with more than one, else uni",
        "parallel.executor",
        metavar="uni|mp",
    ),
    Flag(
        "disable-custom-all-reduce",
        Group.PARALLEL,
        boolean,
        False,
        "GPUs of --tensor-parallel-size add up through NCCL alone; otherwise small sums go through memory that all of "
        "them map, which is quicker",
        "parallel.disable_custom_all_reduce",
        arity=Arity.SWITCH,
    ),
    Flag(
        "data-parallel-size-local",
        Group.PARALLEL,
        integer(0, _MAX_RANKS),
        None,
        "Engine cores that this launcher starts; other launchers start the others. 0: none, with --headless ones "
        "elsewhere. Default: all, or all from --data-parallel-start-rank on",
        "data_parallel.size_local",
        metavar="N",
        short=("-dpl",),
        offline=False,
    ),
    Flag(
        "data-parallel-start-rank",
        Group.PARALLEL,
        integer(0, _MAX_RANKS - 1),
        None,
        "Rank of this launcher's first engine core. Above 0 and without --headless it means --data-parallel-hybrid-lb",
        "data_parallel.start_rank",
        metavar="RANK",
        short=("-dpr",),
        offline=False,
    ),
    Flag(
        "data-parallel-rank",
        Group.PARALLEL,
        integer(0, _MAX_RANKS - 1),
        None,
        "The only rank that this server runs; means --data-parallel-external-lb",
        "data_parallel.start_rank",
        metavar="RANK",
        short=("-dpn",),
        offline=False,
    ),
    Flag(
        "data-parallel-address",
        Group.PARALLEL,
        text,
        "127.0.0.1",
        "Address of the head: where it waits for --headless launchers, and where they find it",
        "data_parallel.address",
        metavar="ADDRESS",
        short=("-dpa",),
        offline=False,
    ),
    Flag(
        "data-parallel-rpc-port",
        Group.PARALLEL,
        integer(1, 65535),
        29550,
        "Port of the head for --headless launchers. Engine cores listen on ports that the system chooses",
        "data_parallel.rpc_port",
        metavar="N",
        short=("-dpp",),
        offline=False,
    ),
    Flag(
        "data-parallel-token",
        Group.PARALLEL,
        text,
        None,
        "Secret that all launchers of a deployment share: with it they prove to each other who they are, and requests "
        "and tokens travel encrypted between machines. Without it the network between them must be private. Better in "
        "the environment than where `ps` shows it",
        "data_parallel.token",
        metavar="SECRET",
        offline=False,
        env=(EnvAlias("TOKENMILL_DP_TOKEN"),),
    ),
    Flag(
        "data-parallel-hybrid-lb",
        Group.PARALLEL,
        boolean,
        False,
        "Every launcher has API servers of its own, for its own engine cores alone; something in front of them spreads "
        "the requests over launchers",
        "data_parallel.load_balancing",
        arity=Arity.SWITCH,
        short=("-dph",),
        offline=False,
    ),
    Flag(
        "data-parallel-external-lb",
        Group.PARALLEL,
        boolean,
        False,
        "Every launcher serves one rank (--data-parallel-rank) by itself; something in front of them spreads the "
        "requests over ranks",
        "data_parallel.load_balancing",
        arity=Arity.SWITCH,
        short=("-dpe",),
        offline=False,
    ),
    Flag(
        "headless",
        Group.PARALLEL,
        boolean,
        False,
        "No API servers, only engine cores, for the head at --data-parallel-address",
        "data_parallel.headless",
        arity=Arity.SWITCH,
        offline=False,
    ),
)
