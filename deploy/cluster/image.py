"""Builds a container image from Debian's static busybox as an OCI archive, without a registry or container engine."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

BUSYBOX = Path("/bin/busybox")
IMAGE = "fovea.local/busybox:1"
"""Image name for pods. The node also uses it for the sandbox container of each pod."""

_APPLETS = ("cat", "echo", "httpd", "ls", "mkdir", "nc", "nslookup", "ps", "sh", "sleep", "tail", "wget")
_TYPE = "application/vnd.oci.image"


def write_image(archive: Path) -> None:
    """Writes `IMAGE`: busybox under the names of a few commands. By default it waits forever."""
    layer = _layer()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/bin/tail", "-f", "/dev/null"], "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    blobs = [json.dumps(config).encode(), layer]
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_TYPE}.manifest.v1+json",
        "config": _descriptor(f"{_TYPE}.config.v1+json", blobs[0]),
        "layers": [_descriptor(f"{_TYPE}.layer.v1.tar", layer)],
    }
    blobs.append(json.dumps(manifest).encode())
    named = _descriptor(f"{_TYPE}.manifest.v1+json", blobs[-1]) | {
        "annotations": {"io.containerd.image.name": IMAGE},
    }
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": [named]}).encode())
        for blob in blobs:
            _add(tar, f"blobs/{_digest(blob).replace(':', '/')}", blob)


def _layer() -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        _add(tar, "bin/busybox", BUSYBOX.read_bytes(), mode=0o755)
        for applet in _APPLETS:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
    return content.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"
