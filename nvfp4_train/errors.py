"""Errors that a person can act on: one sentence, no traceback."""


class UserError(Exception):
    """Something the user can put right; the message names the thing and the remedy. Exit code 1."""

    exit_code = 1
    of_all_ranks = False  # whether every rank of a run raises it: then the first one alone tells it


class ConfigError(UserError):
    """A key, its value and what would be accepted. Exit code 2."""

    exit_code = 2
    of_all_ranks = True


class DataError(ConfigError):
    """Text, tokenizer or shards that cannot be used, with the file's name and the remedy. Exit code 2."""

    of_all_ranks = False


class CheckpointError(ConfigError):
    """A checkpoint or run folder that cannot be used. Exit code 2."""

    of_all_ranks = False


class SaveError(CheckpointError):
    """A checkpoint that could not be written (full disk); what was saved before is untouched. Exit code 1."""

    exit_code = 1


class RecoveryGaveUp(UserError):
    """Training could not go on by itself. Exit code 76."""

    exit_code = 76
    of_all_ranks = True


class RankLost(UserError):
    """Another process of the run is gone; the launcher starts all of them again. Exit code 1."""


class StoppedBySignal(UserError):
    """A signal came and the state has been saved. Exit code 75."""

    exit_code = 75
    of_all_ranks = True
