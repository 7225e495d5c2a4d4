"""Upload an exported folder to the hub."""

from __future__ import annotations

from pathlib import Path

from flowrl.policy.folder import first_sentence


def push(folder: Path, name: str) -> str:
    """Upload a folder to a repository, which is made private if it is new -> its address. The token
    is huggingface_hub's own; its errors hold none."""
    from huggingface_hub import HfApi, get_token

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        said = "Weights and model card of flowrl export"
        made = api.upload_folder(repo_id=name, folder_path=folder, commit_message=said)
        return str(made.commit_url)
    except Exception as error:  # errors of httpx, of the hub and of its validators
        said = first_sentence(error).replace(get_token() or "\0", "***")
        raise ConnectionError(
            f"{folder} is written, and its upload to {name} failed ({said}); try it again with"
            f" hf upload {name} {folder}"
        ) from None
