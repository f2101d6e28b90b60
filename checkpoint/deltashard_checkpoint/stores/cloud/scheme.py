"""The schemes `gs` and `az`, loaded as entry points of the package, so no other module imports this folder."""

from __future__ import annotations

import re

from deltashard_checkpoint.stores.abc import Store
from deltashard_checkpoint.stores.cloud.account import AzureAccount, GoogleAccount
from deltashard_checkpoint.stores.cloud.store import CloudStore
from deltashard_checkpoint.stores.scheme import Scheme, StoreUrl

_ANY = re.compile(".+")


def _google(url: StoreUrl) -> Store:
    account = GoogleAccount(url.bucket, endpoint=url.options.get("endpoint"), where=url.bare)
    return CloudStore(account, url=url.bare, prefix=url.prefix)


def _azure(url: StoreUrl) -> Store:
    account = AzureAccount(
        url.bucket,
        account=url.options.get("account"),
        endpoint=url.options.get("endpoint"),
        where=url.bare,
    )
    return CloudStore(account, url=url.bare, prefix=url.prefix)


GOOGLE = Scheme(
    form="use gs://bucket/prefix",
    bucket=re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII),
    options={"endpoint": _ANY},
    open=_google,
)
AZURE = Scheme(
    form="use az://container/prefix?account=name",
    bucket=re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}", re.ASCII),
    options={"endpoint": _ANY, "account": re.compile(r"[a-z0-9]{3,24}", re.ASCII)},
    open=_azure,
)
