"""A checkpoint's folder to a repository on the Hugging Face Hub, or on another server that speaks its protocol.

url = upload_checkpoint(folder, repository="me/model-int8", message="version 3: ship")
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipeline.errors import PrerequisiteError, StageError, UsageError
from pipeline.provenance import redact


def hub_token(repository: str) -> str:
    """HF_TOKEN, if anything can be uploaded to `repository`.

    Raises UsageError for a name that is no repository's, PrerequisiteError without a token.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UsageError(f"--push {repository}: a repository is OWNER/NAME, as in me/model-int8")
    token = os.environ.get("HF_TOKEN")
    if not token:
        raise PrerequisiteError(
            f"--push {repository}: HF_TOKEN isn't set; put a token with write access into it "
            "(huggingface.co/settings/tokens), or leave --push away"
        )
    return token


def upload_checkpoint(folder: Path, *, repository: str, message: str) -> str:
    """Upload every file of the folder but hidden ones; returns the commit's address.

    A repository that isn't there is made, private: what is published is for its owner to say. HF_ENDPOINT names
    another server. Raises what `hub_token` raises, and StageError where the server is away or refuses.
    """
    token = hub_token(repository)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    endpoint = os.environ.get("HF_ENDPOINT")
    api = HfApi(endpoint=endpoint, token=token)
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        done = api.upload_folder(
            folder_path=folder, repo_id=repository, commit_message=message, ignore_patterns=[".*"]
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        said = " ".join(redact(str(error)).split())[:400].replace(token, "***")
        raise StageError(
            f"not pushed to {repository} at {endpoint or 'huggingface.co'}: {said}; promote again to push later"
        ) from None
    return str(done.commit_url)
