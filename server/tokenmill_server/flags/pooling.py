"""The rows of the flag table about what a model is used for: text or vectors."""

from tokenmill_server.flags.flag import Flag, Group
from tokenmill_server.flags.parsers import one_of

POOLING_TASKS = ("embed", "embedding", "score")

POOLING = (
    Flag(
        "runner",
        Group.MODEL,
        one_of("auto", "generate", "pooling"),
        "auto",
        "What the model is used for: generate text, pooling (a vector of each text, for /v1/embeddings), or auto, what "
        "its files say it was made for",
        "model.pooling",
        metavar="KIND",
    ),
    Flag(
        "convert",
        Group.MODEL,
        one_of("auto", "none", "embed"),
        "auto",
        "embed: a model that generates text gives vectors, as with --runner pooling; none: it must have been made for "
        "what it is used for",
        "model.pooling",
        metavar="KIND",
    ),
    Flag(
        "task",
        Group.MODEL,
        one_of("auto", "generate", *POOLING_TASKS),
        "auto",
        "The old name of --runner: generate, embed, score, or auto",
        "model.pooling",
        metavar="TASK",
    ),
)
