"""Which kinds of video files are read, told by their first bytes alone, whatever a host calls them."""

from tokenmill_server.multimodal.errors import MediaError

NAMES = "MP4, QuickTime, WebM, Matroska, AVI, MPEG-TS, MPEG and animated GIF"
CODEC_NAMES = "H.264, HEVC, AV1, VP8, VP9, MPEG-1, -2 and -4, and Motion JPEG"
_MP4_BOXES = frozenset({b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide", b"pnot"})
_TS_PACKET_BYTES = 188
_TS_SYNC = 0x47


def container_of(data: bytes) -> str:
    """FFmpeg's name of the kind of file. Raises MediaError for what is none of them."""
    if not data:
        raise MediaError("the video is empty: it has no bytes")
    if data[4:8] in _MP4_BOXES:
        return "mp4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if data.startswith(b"RIFF") and data[8:12] == b"AVI ":
        return "avi"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if data.startswith(b"\x00\x00\x01\xba"):
        return "mpeg"
    if len(data) > 2 * _TS_PACKET_BYTES and all(data[place * _TS_PACKET_BYTES] == _TS_SYNC for place in range(3)):
        return "mpegts"
    raise MediaError(f"the media are no video that can be read; {NAMES} can")
