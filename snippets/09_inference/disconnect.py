"""Clients that hang up: their slots stay taken, until the server watches the connection.

A server with two slots answers with one token every 5 ms, for as long as it is asked to. Two
clients ask for a thousand tokens and go away after the first. The third waits for a slot.
"""

import asyncio

SLOTS, PATIENCE = 2, 2.0


# --8<-- [start:server]
class Server:
    def __init__(self, watch: bool) -> None:
        self.watch, self.slots = watch, asyncio.Semaphore(SLOTS)
        self.works: list[asyncio.Task] = []
        self.made = 0

    async def generate(self, tokens: int, outbox: asyncio.Queue) -> None:
        """Hold a slot until the answer is complete, or somebody cancels."""
        try:
            async with self.slots:  # given back on every way out, cancellation included
                for _ in range(tokens):
                    await asyncio.sleep(0.005)
                    self.made += 1
                    outbox.put_nowait(b"token\n")
        finally:
            outbox.put_nowait(None)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tokens, outbox = int(await reader.readline()), asyncio.Queue()
        work = asyncio.create_task(self.generate(tokens, outbox))
        self.works.append(work)
        gone = asyncio.create_task(reader.read())  # returns when the client closes
        if self.watch:
            gone.add_done_callback(lambda _: work.cancel())
        try:
            while (token := await outbox.get()) is not None:
                writer.write(token)
                await writer.drain()
        except ConnectionError:
            pass  # careless: it notes that nobody reads, and the engine goes on writing
        gone.cancel()
        writer.close()


# --8<-- [end:server]


async def client(port: int, tokens: int, read: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"%d\n" % tokens)
    for _ in range(read):
        assert await reader.readline() == b"token\n"
    writer.close()
    await writer.wait_closed()


async def third_client(watch: bool) -> tuple[bool, int]:
    """Whether it got its 40 tokens in time, and how many the server made for nobody."""
    server = Server(watch)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    await asyncio.gather(*(client(port, 1000, read=1) for _ in range(SLOTS)))
    left = server.made
    assert left >= SLOTS  # each of the two has read one
    try:
        await asyncio.wait_for(client(port, 40, read=40), PATIENCE)
        answered = True
    except TimeoutError:
        answered = False
    listener.close()
    for_nobody = server.made - left - 40 * answered
    for work in server.works:  # the end of the experiment
        work.cancel()
    await asyncio.sleep(0.05)
    return answered, for_nobody


def main() -> None:
    for words, watch in (("careless", False), ("watching", True)):
        answered, for_nobody = asyncio.run(third_client(watch))
        outcome = "answered" if answered else f"still waiting after {PATIENCE:.0f} s"
        print(f"{words}: the third client is {outcome}; ≈{for_nobody} tokens made for nobody")
        assert answered == watch
        assert for_nobody < 20 or not watch


if __name__ == "__main__":
    main()
