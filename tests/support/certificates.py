"""Certificates for tests of HTTPS, signed by themselves."""

import subprocess
from pathlib import Path


def make_certificate(folder: Path, name: str = "localhost", password: str | None = None) -> tuple[str, str]:
    """Paths of a certificate for `name` and 127.0.0.1, and of its private key."""
    certificate, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    secret = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
    _sign(name, certificate, "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *secret, "-keyout", key)
    return certificate, key


def sign_again(key: Path, certificate: Path, name: str = "localhost") -> None:
    """Makes another certificate for a private key that has one."""
    _sign(name, str(certificate), "-key", str(key))


def _sign(name: str, certificate: str, *key: str) -> None:
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name},IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", *key, *names, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
