"""Certificates for tests of HTTPS, signed by themselves."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "localhost", password: str | None = None) -> tuple[str, str]:
    """Paths of a certificate for `name` and 127.0.0.1, and of its private key."""
    certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    secret = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secret]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key
