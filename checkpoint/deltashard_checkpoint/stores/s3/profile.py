"""Keys of a profile in AWS's two files; other profile settings need botocore.

The credentials file (`AWS_SHARED_CREDENTIALS_FILE`, else `~/.aws/credentials`) has the section `NAME`, the config file
(`AWS_CONFIG_FILE`, else `~/.aws/config`) the section `profile NAME`. Precedence is botocore's: a role or single
sign-on, keys of the credentials file, a process, keys of the config file.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from minio.credentials.credentials import Credentials

from deltashard_checkpoint.stores.abc import CredentialsMissing

BEFORE_KEYS = ("role_arn", "sso_session", "sso_start_url", "login_session")
AFTER_KEYS = ("credential_process",)
"""Settings that need botocore: with precedence over keys of the credentials file, and after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFiles:
    """The two files and the selected profile."""

    name: str
    credentials: Path
    config: Path
    named: bool
    """Whether the credentials file is configured explicitly."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ProfileFiles:
        """Create from the environment; a missing home is the root directory."""
        folder = Path(environment.get("HOME") or "/") / ".aws"
        credentials = environment.get("AWS_SHARED_CREDENTIALS_FILE")
        return cls(
            name=environment.get("AWS_PROFILE") or "default",
            credentials=Path(credentials) if credentials else folder / "credentials",
            config=Path(environment.get("AWS_CONFIG_FILE") or folder / "config"),
            named=bool(credentials),
        )

    @property
    def state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_state(path) for path in (self.credentials, self.config))

    @property
    def is_configured(self) -> bool:
        return (
            self.named
            or self.name != "default"
            or self.credentials.is_file()
            or bool(_section(self.config, self._title))
        )

    @property
    def _title(self) -> str:
        return "default" if self.name == "default" else f"profile {self.name}"

    def read(self) -> Credentials | str | None:
        """Return keys, the setting that needs botocore, or None if the profile has neither.

        Raises `CredentialsMissing` if a configured file is unreadable, or either is malformed.
        """
        mine = _section(self.credentials, self.name, must_exist=self.named)
        config = _section(self.config, self._title)
        both = {**config, **mine}
        return (
            next((name for name in BEFORE_KEYS if both.get(name)), None)
            or _keys(mine)
            or next((name for name in AFTER_KEYS if both.get(name)), None)
            or _keys(config)
        )


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _section(path: Path, title: str, *, must_exist: bool = False) -> dict[str, str]:
    """Return a section's settings; empty if the file or section is missing."""
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
    except (OSError, ValueError) as error:
        if must_exist or not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise _unreadable(path, title, reason or "") from None
        return {}
    except configparser.Error as error:
        raise _unreadable(path, title, f"{type(error).__name__}: not an AWS configuration file") from None
    return dict(parser.items(title)) if parser.has_section(title) else {}


def _unreadable(path: Path, title: str, reason: str) -> CredentialsMissing:
    return CredentialsMissing(
        f"no store credentials in profile {title.removeprefix('profile ')}: {reason}",
        where=str(path),
        remedy="in a pod: create the Secret that the CheckpointPolicy names, with the key `credentials`; it is used at "
        "once",
    )


def _keys(section: Mapping[str, str]) -> Credentials | None:
    key, secret = section.get("aws_access_key_id"), section.get("aws_secret_access_key")
    return Credentials(key, secret, section.get("aws_session_token") or None) if key and secret else None
