"""What went wrong on the Hugging Face hub, as one sentence, for every download from it."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from huggingface_hub import HfApi
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import MtpGgufError
from .remote import HubModel


@contextmanager
def hub_errors(
    model: HubModel, kind: type[MtpGgufError], action: str = "download"
) -> Iterator[None]:
    """Turn the errors of huggingface_hub about `model` into a `kind` that says what to do.

    action: what failed, for errors that have no message of their own.
    """
    hub_id, revision = model
    try:
        yield
    except (GatedRepoError, RepositoryNotFoundError) as error:
        gated = isinstance(error, GatedRepoError)
        if not gated and (other := _other_kind(hub_id)):
            raise kind(f"{hub_id}: expected a model on the hub, found {other}") from None
        raise kind(
            f"{hub_id}: {'is gated' if gated else 'no such model, or it is private'} on the hub; "
            f"{'accept its terms there and ' if gated else 'check the name, or '}"
            "log in with `hf auth login`, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise kind(f"{hub_id}: no revision {revision!r} on the hub") from None
    except LocalEntryNotFoundError as error:
        raise kind(
            f"{hub_id}: incomplete in the local cache, and the hub cannot be reached: "
            f"{first_line(error.__cause__ or error)}"
        ) from None
    except HFValidationError as error:
        raise kind(f"{hub_id}: expected OWNER/NAME: {error}") from None
    except MtpGgufError:
        raise
    except Exception as error:  # the underlying HTTP library raises its own exceptions
        refused = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        step = "log in with `hf auth login`, or correct HF_TOKEN" if refused else "try again"
        raise kind(f"{hub_id}: {action} failed: {first_line(error)}; {step}") from None


def first_line(error: BaseException) -> str:
    """The message of an error, without the help that libraries append."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _other_kind(hub_id: str) -> str | None:
    """The kind of another hub repository (dataset, space) of this name; None if there is none."""
    for kind in ("dataset", "space"):
        with suppress(Exception):  # this only improves an error message, so failures do not matter
            if HfApi().repo_exists(hub_id, repo_type=kind):
                return f"a {kind}"
    return None
