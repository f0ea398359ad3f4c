"""How checkpoints with a vision encoder call their tensors, and how we do.

Ours: the decoder as if it were alone (`model.layers.0...`, `lm_head`), the encoder under `visual.`, LLaVA's projector
under `multi_modal_projector.` and its `image_newline`. Old checkpoints have `visual.` beside `model.` (Qwen), or
`vision_tower.vision_model.` beside `language_model.model.` (LLaVA). In new ones `model.` holds both, and the decoder is
`model.language_model.`.
"""

import re

_DECODER = re.compile(r"^(?:model\.language_model|language_model\.model)\.")
_HEAD = re.compile(r"^language_model\.lm_head\.")
_ENCODER = re.compile(r"^(?:model\.)?(?:visual|vision_tower(?:\.vision_model)?)\.")
_PROJECTOR = re.compile(r"^model\.(?=multi_modal_projector\.|image_newline$)")
_LAYER = re.compile(r"^visual\.encoder\.layers\.(\d+)\.")
_UNUSED = re.compile(r"^visual\.(?:post_layernorm\.|head\.|embeddings\.position_ids$|rotary_pos_emb\.inv_freq$)")


def own_name(name: str, num_tower_layers: int | None) -> str | None:
    """Our name of a tensor; None for one that nothing we compute depends on: the layers of a tower past the first
    `num_tower_layers`, and what pools their result."""
    for pattern, ours in ((_DECODER, "model."), (_HEAD, "lm_head."), (_ENCODER, "visual."), (_PROJECTOR, "")):
        name = pattern.sub(ours, name, count=1)
    layer = _LAYER.match(name)
    is_past = layer is not None and num_tower_layers is not None and int(layer[1]) >= num_tower_layers
    return None if is_past or _UNUSED.match(name) else name


def decoder_name(name: str) -> str | None:
    """As `own_name`, if only the decoder is wanted."""
    ours = own_name(name, None)
    return ours if ours is not None and ours.startswith(("model.", "lm_head.")) else None
