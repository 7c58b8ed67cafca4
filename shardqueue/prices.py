"""What requests cost, at list prices: one small table, and which of its rows a URL falls under.

US dollars for 1,000 requests of the standard class in one region: Amazon S3 in us-east-1
(aws.amazon.com/s3/pricing), Cloudflare R2 (developers.cloudflare.com/r2/pricing; a listing is of class A), Google
Cloud Storage in one region (cloud.google.com/storage/pricing), Azure Blob Storage, hot, LRS
(azure.microsoft.com/pricing/details/storage/blobs; the upper end of its regions). Those of R2 and Google were
confirmed on the date below, the others are as commonly published. Removing costs nothing on any of them. Storage and
transfer are left out, since records are a few hundred bytes each. A folder, or a server of one's own, has no price.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from shardqueue.mailbox.places import store_at

AS_OF = "2026-11-30"


@dataclass(frozen=True, slots=True)
class Price:
    """US dollars for 1,000 requests of each kind.

    Attributes:
        store: whose price it is.
        write: of a create or an overwrite.
        read: of one object.
        listing: of a page of keys.
    """

    store: str
    write: float
    read: float
    listing: float

    def dollars(self, writes: float, reads: float, listings: float) -> float:
        """What so many requests cost, in US dollars."""
        return (writes * self.write + reads * self.read + listings * self.listing) / 1000


S3 = Price("Amazon S3, us-east-1", write=0.005, read=0.0004, listing=0.005)
R2 = Price("Cloudflare R2", write=0.0045, read=0.00036, listing=0.0045)
GCS = Price("Google Cloud Storage, regional", write=0.005, read=0.0004, listing=0.005)
AZURE = Price("Azure Blob Storage, hot, LRS", write=0.0065, read=0.0005, listing=0.0065)

_HOSTS = ((r"\.amazonaws\.com(\.cn)?$", S3), (r"\.r2\.cloudflarestorage\.com$", R2))


def price_at(url: str, endpoint: str | None = None) -> Price | None:
    """The price of requests to `url`, or None where there is none, or none is known.

    Args:
        url: the mailbox's.
        endpoint: URL of the S3 server, "" for Amazon's, None for what the environment and AWS's configuration say.
    """
    store = store_at(url)
    if store != "s3":
        return {"gs": GCS, "az": AZURE}.get(store)
    host = urlsplit(_endpoint() if endpoint is None else endpoint).hostname or "s3.amazonaws.com"
    return next((price for pattern, price in _HOSTS if re.search(pattern, f".{host}")), None)


def _endpoint() -> str:
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        return str(Session().create_client("s3", region_name="us-east-1").meta.endpoint_url)
    except BotoCoreError:
        return "https://unknown.invalid"
