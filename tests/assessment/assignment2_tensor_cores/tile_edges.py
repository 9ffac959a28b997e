"""Step 4: parts of tiles at the edge"""

STEP, HINT = 4, "edge"


def best_tile(m: int, n: int, tiles: list[Tile], sms: int) -> tuple[Tile, float]:
    def rate(tile: Tile) -> float:
        waves = max(m / tile.m * n / tile.n / sms, 1)
        return tile.share * m * n / (waves * sms * tile.m * tile.n)

    best = max(tiles, key=rate)
    return best, rate(best)
