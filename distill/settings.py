"""What the trainer of a distillation is told once, at its start. Plain values: they cross process borders."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from burnish.distill.config import DistillAlgoConfig, HealthConfig
from burnish.distill.specialist import Teacher
from burnish.rollout.settings import PolicyTrainerSettings

if TYPE_CHECKING:
    from burnish.distill.trainer import Distiller


@dataclass(frozen=True, kw_only=True)
class DistillerSettings(PolicyTrainerSettings):
    """Of a `Distiller`."""

    algo: DistillAlgoConfig
    teachers: Mapping[str, Teacher]
    health: HealthConfig
    cache: str
    """Folder of the teachers' hidden states."""
    cache_bytes: int
    num_ids: int
    """Ids that the student and every teacher have."""

    def build(self) -> "Distiller":
        """In the trainer's own process: torch is loaded here."""
        from burnish.distill.trainer import Distiller

        return Distiller(self)
