"""What is opened and closed with a block: `with` and `async with` for the clients."""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import Any, Self


class AsyncManaged(ABC):
    """A new one is not connected yet: `await` it, or enter it with `async with`, which also closes it."""

    @abstractmethod
    async def _open(self) -> Self: ...

    @abstractmethod
    async def close(self) -> None: ...

    def __await__(self) -> Generator[Any, None, Self]:
        return self._open().__await__()

    async def __aenter__(self) -> Self:
        return await self._open()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.close()


class Managed(ABC):
    """A context manager: leaving it closes it."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()
