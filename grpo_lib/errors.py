"""Every error that a user can meet, and what the command line makes of it.

GrpoError                     exit code 2 from the command line, one message, no traceback
├── ConfigError               a value in the configuration, or two that don't fit together
├── DataError                 prompts, references or demonstrations that can't be used
├── ModelError                a model, tokenizer or chat template that can't be used
├── AlgorithmError            a batch that the configured algorithm can't work with (exit code 1)
├── RewardError               a reward function that failed too often (exit code 1)
├── MissingPackageError       an engine or backend was asked for that is not installed
├── TrackingError             MLflow refuses
│   └── TrackingDownError         no answer from MLflow, for longer than tracking.patience_seconds
├── LeaseHeldError            another process works on the run
├── ServiceError              a service of `grpo up` did not start, or died again and again (exit code 1)
├── StoreError                the object store
│   ├── StoreUnreachableError     no permission, no bucket, disk full
│   │   └── StoreDownError            no answer, for longer than store.patience_seconds
│   ├── NotFoundError             nothing is stored at that place
│   └── CorruptError              what is stored differs from what its manifest says
└── RunError                  the run itself can't go on (exit code 1)
    ├── ParityError               engine and trainer disagree on log-probs
    ├── ReplayError               a replayed update did not give the recorded policy
    ├── NonFiniteError            a loss, gradient or log-prob is NaN or infinite
    ├── RankError                 a rank of a group raised an exception that is none of these
    ├── RankLostError             a rank was killed or did not answer in time, or its group could not start
    ├── ServerLostError           no generation server is left, or they failed at one row again and again
    ├── LeaseLostError            another process took the run over, while this one was paused
    ├── WorkerError               a stage raised an exception on a worker that is none of these
    ├── WorkerLostError           a worker was killed, or does not come up, or the cluster is gone
    └── StageCancelledError       somebody stopped the stage

Messages name the value, the bound and the remedy.
"""


class GrpoError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 2


class ConfigError(GrpoError, ValueError):
    """A configuration value is wrong, or two of them contradict each other."""


class DataError(GrpoError, ValueError):
    """Prompts, references or demonstrations can't be used."""


class ModelError(GrpoError, ValueError):
    """A model, tokenizer or chat template can't be used."""


class RewardError(GrpoError, ValueError):
    """A reward function can't be used or failed too often."""

    exit_code = 1


class AlgorithmError(GrpoError, ValueError):
    """The configured algorithm can't work with this batch: nothing is left of it, or groups are too small."""

    exit_code = 1


class MissingPackageError(GrpoError, ImportError):
    """An engine or backend was asked for whose package is not installed."""


class TrackingError(GrpoError):
    """MLflow can't be reached or refuses what it was given."""


class TrackingDownError(TrackingError):
    """MLflow does not answer; it may be back later."""


class LeaseHeldError(GrpoError):
    """Another process works on the run; the message says which, and what to do."""


class ServiceError(GrpoError):
    """A service did not start, or died again and again; the message holds its log's end."""

    exit_code = 1


class StoreError(GrpoError):
    """Base of the object store's errors."""


class StoreUnreachableError(StoreError):
    """The store does not answer, refuses access, or is full."""


class StoreDownError(StoreUnreachableError):
    """The store does not answer, or says that it can't now; it may be back later."""


class NotFoundError(StoreError, LookupError):
    """Nothing is stored at that place."""


class CorruptError(StoreError):
    """Stored bytes differ from their manifest; the message holds the path."""


class RunError(GrpoError):
    """The run can't go on; nothing that was committed is lost."""

    exit_code = 1


class ParityError(RunError):
    """The engine's log-probs differ from the trainer's by more than allowed."""


class ReplayError(RunError):
    """A replayed update gave another policy than the recorded one."""


class NonFiniteError(RunError):
    """A loss, gradient or log-prob is NaN or infinite."""


class RankError(RunError):
    """A rank of a group raised an exception that is no ``GrpoError``; the message holds its traceback."""


class RankLostError(RunError):
    """A rank was killed or did not answer in time, or its group could not start; the message holds its log's end."""


class ServerLostError(RunError):
    """No generation server is left, or they failed at one row again and again; the message says how each failed."""


class LeaseLostError(RunError):
    """Another process took the run over, while this one was paused; the message says which."""


class WorkerError(RunError):
    """A stage raised an exception on a worker that is no ``GrpoError``; the message holds its traceback."""


class WorkerLostError(RunError):
    """A worker was killed, or nobody offers one, or the cluster is gone; the message says how to start one."""


class NobodyOffersError(WorkerLostError):
    """The worker was waited for, and its role or cluster is not there: to try again at once would wait again."""


class StageCancelledError(RunError):
    """Somebody stopped the stage: the run was cancelled, or a later flow of the run took over."""
