"""A store in Google Cloud Storage or Azure Blob Storage, through obstore."""

from importlib.util import find_spec

from deltashard_checkpoint.errors import UserError

if _missing := [name for name in ("certifi", "obstore") if find_spec(name) is None]:
    raise UserError(
        f"gs:// and az:// need the packages {', '.join(_missing)}", remedy="pip install 'deltashard[cloud]'"
    )
