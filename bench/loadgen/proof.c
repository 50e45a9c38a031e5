/* Payloads, and the proof that each arrived once and whole.
 *
 *     offset  size  field
 *     0       8     the run's number
 *     8       8     the message's number, from 0
 *     16      n     noise, from a place in the table that depends on the number
 *
 * All bytes of what arrives are compared, so a truncated, shifted or mixed payload is found. A bit for
 * each number finds what came twice; what never came keeps the run from ending.
 */

#include "loadgen.h"

#include <inttypes.h>
#include <string.h>

enum { HEAD_BYTES = 16, PLACES = 4096 };

static uint8_t *noise;

void proof_prepare(void)
{
    if (settings.size_bytes < HEAD_BYTES)
        die("--size %zu: a payload needs at least %d bytes", settings.size_bytes, HEAD_BYTES);
    size_t length = PLACES + settings.size_bytes;
    noise = allocate(length, 1);
    uint64_t state = settings.run * 2 + 1;
    for (size_t i = 0; i < length; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        noise[i] = state >> 56;
    }
}

static const uint8_t *noise_of(uint64_t number)
{
    return noise + number * 61 % PLACES;
}

void proof_write(uint8_t *payload, uint64_t number)
{
    memcpy(payload, &settings.run, 8);
    memcpy(payload + 8, &number, 8);
    memcpy(payload + HEAD_BYTES, noise_of(number), settings.size_bytes - HEAD_BYTES);
}

uint64_t proof_check(const uint8_t *payload, size_t length)
{
    if (length != settings.size_bytes)
        die("a payload of %zu bytes arrived; %zu were sent", length, settings.size_bytes);
    uint64_t run, number;
    memcpy(&run, payload, 8);
    memcpy(&number, payload + 8, 8);
    if (run != settings.run)
        die("a message of run %" PRIu64 " arrived in run %" PRIu64 ": the queue was not empty", run, settings.run);
    if (memcmp(payload + HEAD_BYTES, noise_of(number), length - HEAD_BYTES))
        die("message %" PRIu64 " arrived damaged", number);
    return number;
}

void seen_prepare(struct seen *seen, const char *what, uint64_t messages)
{
    seen->what = what;
    seen->bits = allocate(messages / 64 + 1, sizeof *seen->bits);
    seen->count = 0;
}

void see(struct seen *seen, uint64_t number)
{
    /* One more than the run has: the message that proves that everything before it was settled. */
    if (number > settings.messages)
        die("message %" PRIu64 " %s, of %" PRIu64, number, seen->what, settings.messages);
    uint64_t bit = UINT64_C(1) << number % 64;
    if (seen->bits[number / 64] & bit)
        die("message %" PRIu64 " %s twice", number, seen->what);
    seen->bits[number / 64] |= bit;
    seen->count++;
}
