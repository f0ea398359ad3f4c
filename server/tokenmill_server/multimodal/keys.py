"""Names of prepared images: equal if and only if the encoder would see the same."""

from blake3 import blake3

from tokenmill_server.multimodal.bands import bands_of
from tokenmill_server.multimodal.decode import Picture

KEY_BYTES = 32


def media_key(picture: Picture, options: str) -> bytes:
    """Key of an image that is prepared as `options` says: everything beside the pixels that changes the result.

    Each part is preceded by what it is and how long, so that no two different images have the same bytes: 120 x 80
    pixels and 80 x 120 may.
    """
    hasher = blake3()
    head = f"image RGB {picture.width}x{picture.height} uint8 {len(options)}:{options};"
    hasher.update(head.encode())
    for _, band in bands_of(picture.image):
        hasher.update(band.tobytes())
    return hasher.digest()
