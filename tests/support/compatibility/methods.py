"""Methods of vLLM's `LLM`."""

from tests.support.compatibility.rows import ReplyRow, Status

METHODS = (
    ReplyRow("generate"),
    ReplyRow("chat"),
    ReplyRow("embed", note="of models that make vectors (`runner='pooling'`)"),
    ReplyRow(
        "encode",
        Status.DIFFERS,
        note="`pooling_task='embed'` alone, by name; `outputs.data` is a numpy array; no `pooling_params`: "
        "`normalize` and `dimensions` are arguments",
    ),
    ReplyRow("score", note="also by cross-encoders"),
    ReplyRow("get_tokenizer", Status.DIFFERS, note="has `encode` and `decode`, and is not that of transformers"),
    *(
        ReplyRow(name, Status.ABSENT)
        for name in (
            *("classify", "reward", "beam_search", "get_default_sampling_params", "get_metrics"),
            *("collective_rpc", "apply_model", "reset_prefix_cache", "sleep", "wake_up"),
            *("start_profile", "stop_profile"),
        )
    ),
)
