"""Certificates of a cluster, made with the openssl program (3.0 or newer), and the kubeconfigs that carry them."""

import base64
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpunode.cluster.errors import ClusterError
from gpunode.cluster.processes import replace_text

_DAYS: Final = "3650"
# P-256: making a key takes milliseconds, which counts with two keys a node.
_NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Paths of a certificate and its private key (PEM)."""

    cert: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Pki:
    """The keys of one cluster. Every method makes what is missing and leaves alone what is there."""

    directory: Path

    @property
    def ca(self) -> KeyPair:
        return self._pair("ca")

    @property
    def etcd_ca(self) -> KeyPair:
        """Of its own: whoever the cluster's authority vouches for, a node say, must not get into etcd."""
        return self._pair("etcd-ca")

    @property
    def front_proxy_ca(self) -> KeyPair:
        """Signs the certificate with which the API server calls aggregated API servers, and nothing else."""
        return self._pair("front-proxy-ca")

    @property
    def service_account_key(self) -> Path:
        return self.directory / "sa.key"

    @property
    def service_account_public_key(self) -> Path:
        return self.directory / "sa.pub"

    def prepare(self) -> None:
        """The certificate authorities and the key that signs ServiceAccount tokens."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("ca", "etcd-ca", "front-proxy-ca"):
            self._certificate(name, f"/CN=gpunode-{name}", "basicConstraints=critical,CA:TRUE", ())
        key, public = self.service_account_key, self.service_account_public_key
        if not public.exists():
            new_key, new_public = self._new(key), self._new(public)
            _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(new_key))
            _openssl("ec", "-in", str(new_key), "-pubout", "-out", str(new_public))
            new_key.replace(key)
            new_public.replace(public)

    def leaf(self, name: str, subject: str, names: tuple[str, ...] = (), ca: str = "ca") -> KeyPair:
        """A certificate for client and server use.

        subject  "/O=GROUP/CN=USER" in openssl's notation
        names    subject alternative names, "DNS:..." or "IP:..."
        ca       which authority signs: "ca", "etcd-ca" or "front-proxy-ca"
        """
        alternative = f"\nsubjectAltName={','.join(names)}" if names else ""
        extensions = f"basicConstraints=critical,CA:FALSE\nextendedKeyUsage=clientAuth,serverAuth{alternative}"
        authority = self._pair(ca)
        signer = ("-CA", str(authority.cert), "-CAkey", str(authority.key))
        return self._certificate(name, subject, extensions, signer)

    def _certificate(self, name: str, subject: str, extensions: str, signer: tuple[str, ...]) -> KeyPair:
        pair = self._pair(name)
        if pair.cert.exists():
            return pair
        # A configuration of our own: the one of the distribution would add its extensions to ours.
        config = self.directory / f".{name}.conf"
        replace_text(config, f"[req]\ndistinguished_name=dn\nx509_extensions=ext\n[dn]\n[ext]\n{extensions}\n")
        cert, key = self._new(pair.cert), self._new(pair.key)
        request = ("req", "-x509", "-config", str(config), "-days", _DAYS, "-subj", subject)
        _openssl(*request, *signer, *_NEW_KEY, "-keyout", str(key), "-out", str(cert))
        config.unlink()
        # The certificate comes last: if it is there, so is its key.
        key.replace(pair.key)
        cert.replace(pair.cert)
        return pair

    def _pair(self, name: str) -> KeyPair:
        return KeyPair(self.directory / f"{name}.crt", self.directory / f"{name}.key")

    def _new(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}")


def kubeconfig(server: str, ca: bytes, user: dict[str, str], context: str) -> str:
    """Text of a kubeconfig that needs no other file (JSON, which is YAML).

    user  fields of its user entry: {"token": ...} or what `client_certificate` returns
    """
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": context, "cluster": {"server": server, "certificate-authority-data": _b64(ca)}}],
            "users": [{"name": context, "user": user}],
            "contexts": [{"name": context, "context": {"cluster": context, "user": context}}],
            "current-context": context,
        },
        indent=1,
    )


def client_certificate(pair: KeyPair) -> dict[str, str]:
    """The user entry of a kubeconfig that authenticates with a certificate."""
    return {
        "client-certificate-data": _b64(pair.cert.read_bytes()),
        "client-key-data": _b64(pair.key.read_bytes()),
    }


def write_secret(path: Path, text: str) -> None:
    """Writes a file that only its owner may read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text, mode=0o600)


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _openssl(*args: str) -> None:
    result = subprocess.run(["openssl", *args], capture_output=True, text=True, check=False)  # noqa: S607
    if result.returncode != 0:
        raise ClusterError(f"openssl {args[0]} failed: {result.stderr.strip()}")
