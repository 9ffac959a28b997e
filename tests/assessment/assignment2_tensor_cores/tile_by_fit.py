"""Step 4: all tiles are as good"""

STEP, HINT = 4, "share"


def best_tile(m: int, n: int, tiles: list[Tile], sms: int) -> tuple[Tile, float]:
    def rate(tile: Tile) -> float:
        waves = -(-(-(-m // tile.m) * -(-n // tile.n)) // sms)
        return m * n / (waves * sms * tile.m * tile.n)

    best = max(tiles, key=rate)
    return best, rate(best)
