"""The one HTTP client: it goes where it is told and nowhere else.

It knows URLs and httpx. It does not know what is asked. Read `specnb.serving.audit` next.
"""

from urllib.parse import urlsplit


def base_url(base):
    """The URL without a slash or /v1 at its end; a ValueError for what is none."""
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{base!r} is no base URL; write it like http://127.0.0.1:8111")
    return base.rstrip("/").removesuffix("/v1")


def client_options(concurrency, timeout):
    """Of an httpx client that goes where it is told and nowhere else."""
    import httpx

    # Many servers close a connection after 5 idle seconds, httpx by default too: a request could meet the closing.
    limits = httpx.Limits(max_connections=concurrency, keepalive_expiry=2)
    return {"trust_env": False, "follow_redirects": False, "timeout": timeout, "limits": limits}
