/* Penstock's three wires. Sizes and the queue are the same for all messages of a run, so almost every
 * byte that the server sends is known beforehand; whatever differs ends the run.
 *
 *     sspq    one message at a time; CONFIRM and the next RECEIVE in one segment
 *     phpmq   32-byte packet headers, no line breaks; a window; one acknowledgement a message
 *     rq      MAX is the window; NOREPLY requests are confirmed by DELIVERED and settled by DELIVERED;
 *             other requests are settled by DELIVERED and REPLY, which brings the payload back
 */

#include "loadgen.h"

#include <stdio.h>
#include <string.h>

static uint32_t read_u32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void write_u32(uint8_t *at, uint32_t value)
{
    at[0] = value >> 24;
    at[1] = value >> 16;
    at[2] = value >> 8;
    at[3] = value;
}

static void send_framed(struct connection *connection, const void *head, size_t head_length, uint64_t number,
                        const void *tail, size_t tail_length)
{
    size_t length = head_length + settings.size_bytes + tail_length;
    uint8_t *at = room_for(&connection->out, length);
    memcpy(at, head, head_length);
    proof_write(at + head_length, number);
    memcpy(at + head_length + settings.size_bytes, tail, tail_length);
    connection->out.end += length;
}

/* --- sspq ------------------------------------------------------------------------------------------- */

enum { SSPQ_HEAD_BYTES = 8, SSPQ_SEND = 0x5e, SSPQ_RECEIVE = 0xec, SSPQ_CONFIRM = 0xc0, SSPQ_ENDLESS = 255 };

static void sspq_control(struct connection *connection, uint8_t type)
{
    const uint8_t frame[SSPQ_HEAD_BYTES] = {0x55, 0x99, type};
    append(connection, frame, sizeof frame);
}

static void sspq_send(struct connection *connection, uint64_t number)
{
    uint8_t head[SSPQ_HEAD_BYTES] = {0x55, 0x99, SSPQ_SEND, SSPQ_ENDLESS};
    write_u32(head + 4, settings.size_bytes);
    send_framed(connection, head, sizeof head, number, "", 0);
}

static void sspq_ask(struct connection *connection)
{
    if (!connection->asked && may_ask()) {
        sspq_control(connection, SSPQ_RECEIVE);
        connection->asked = 1;
    }
}

static void sspq_probe(struct connection *connection)
{
    sspq_control(connection, SSPQ_RECEIVE);
}

static size_t sspq_read(struct connection *connection, const uint8_t *bytes, size_t length)
{
    size_t used = 0;
    size_t frame = SSPQ_HEAD_BYTES + settings.size_bytes;
    while (length - used >= SSPQ_HEAD_BYTES) {
        const uint8_t *at = bytes + used;
        if (at[0] != 0x55 || at[1] != 0x99 || at[2] != SSPQ_SEND || read_u32(at + 4) != settings.size_bytes)
            die("sspq: a frame of type %#x with %u bytes, where a message was asked for", at[2], read_u32(at + 4));
        if (length - used < frame)
            break;
        arrived(connection, at + SSPQ_HEAD_BYTES, settings.size_bytes);
        used += frame;
        if (!connection->is_producer) {
            connection->asked = 0;
            sspq_control(connection, SSPQ_CONFIRM);
            sspq_ask(connection);
        }
    }
    return used;
}

const struct wire sspq = {
    .name = "sspq",
    .send = sspq_send,
    .ask = sspq_ask,
    .probe = sspq_probe,
    .read = sspq_read,
};

/* --- phpmq ------------------------------------------------------------------------------------------ */

enum { PHPMQ_ID_BYTES = 32, PHPMQ_HEAD_BYTES_MAX = 512 };

struct constant {
    char bytes[PHPMQ_HEAD_BYTES_MAX];
    int length;
};

static struct constant phpmq_message, phpmq_dispatch, phpmq_dispatch_id, phpmq_ack;

static void phpmq_prepare(void)
{
    const char *queue = settings.queue;
    int queue_length = strlen(queue);
    const struct {
        struct constant *constant;
        const char *head;
        const char *next;
        size_t next_length;
    } begins[] = {
        {&phpmq_message, "H0100102", "P02", settings.size_bytes},
        {&phpmq_dispatch, "H0100303", "P02", settings.size_bytes},
        {&phpmq_ack, "H0100402", "P03", PHPMQ_ID_BYTES},
    };
    for (size_t i = 0; i < sizeof begins / sizeof *begins; i++)
        begins[i].constant->length =
            snprintf(begins[i].constant->bytes, PHPMQ_HEAD_BYTES_MAX, "%sP01%029d%s%s%029zu", begins[i].head,
                     queue_length, queue, begins[i].next, begins[i].next_length);
    phpmq_dispatch_id.length =
        snprintf(phpmq_dispatch_id.bytes, PHPMQ_HEAD_BYTES_MAX, "P03%029d", PHPMQ_ID_BYTES);
}

static void phpmq_send(struct connection *connection, uint64_t number)
{
    send_framed(connection, phpmq_message.bytes, phpmq_message.length, number, "", 0);
}

static void phpmq_consume(struct connection *connection, unsigned window)
{
    append_text(connection, "H0100202P01%029zu%sP04%029d%u", strlen(settings.queue), settings.queue,
                snprintf(NULL, 0, "%u", window), window);
}

static void phpmq_ask(struct connection *connection)
{
    if (!connection->asked)
        phpmq_consume(connection, settings.window);
    connection->asked = 1; /* once: a window stays open */
}

static void phpmq_leave(struct connection *connection)
{
    phpmq_consume(connection, 0);
}

static void phpmq_probe(struct connection *connection)
{
    phpmq_consume(connection, 1);
}

static size_t phpmq_read(struct connection *connection, const uint8_t *bytes, size_t length)
{
    size_t used = 0;
    size_t head = phpmq_dispatch.length;
    size_t head_of_id = head + settings.size_bytes;
    size_t id = head_of_id + phpmq_dispatch_id.length;
    while (length - used >= id + PHPMQ_ID_BYTES) {
        const uint8_t *at = bytes + used;
        if (memcmp(at, phpmq_dispatch.bytes, head) ||
            memcmp(at + head_of_id, phpmq_dispatch_id.bytes, phpmq_dispatch_id.length))
            die("phpmq: '%.80s' is no dispatch of a message of this run", (const char *)at);
        arrived(connection, at + head, settings.size_bytes);
        if (!connection->is_producer) {
            append(connection, phpmq_ack.bytes, phpmq_ack.length);
            append(connection, at + id, PHPMQ_ID_BYTES);
        }
        used += id + PHPMQ_ID_BYTES;
    }
    return used;
}

const struct wire phpmq = {
    .name = "phpmq",
    .prepare = phpmq_prepare,
    .send = phpmq_send,
    .ask = phpmq_ask,
    .leave = phpmq_leave,
    .probe = phpmq_probe,
    .read = phpmq_read,
};

/* --- rq --------------------------------------------------------------------------------------------- */

enum {
    RQ_CLEAR = 1,
    RQ_PING = 5,
    RQ_PONG = 6,
    RQ_REQUEST = 10,
    RQ_REPLY = 11,
    RQ_DELIVERED = 13,
    RQ_CONSUME = 20,
    RQ_CONSUMING = 24,
    RQ_NOREPLY = 33,
    RQ_PRIORITY = 64,
    RQ_QUEUEID = 96,
    RQ_MAX = 98,
    RQ_ID = 128,
    RQ_QUEUE = 160,
    RQ_PAYLOAD = 224,
    RQ_PRIORITY_NORMAL = 20,
};

static void rq_send(struct connection *connection, uint64_t number)
{
    uint8_t head[512] = {RQ_CLEAR, RQ_ID};
    const uint8_t tail[] = {RQ_NOREPLY, RQ_REQUEST};
    size_t queue_length = strlen(settings.queue);
    uint8_t *at = head + 2;
    write_u32(at, number);
    at[4] = RQ_QUEUE;
    at[5] = queue_length;
    memcpy(at + 6, settings.queue, queue_length);
    at += 6 + queue_length;
    at[0] = RQ_PAYLOAD;
    write_u32(at + 1, settings.size_bytes);
    bool wants_reply = settings.mode->requests;
    send_framed(connection, head, at + 5 - head, number, tail + wants_reply, sizeof tail - wants_reply);
}

static void rq_ask(struct connection *connection)
{
    if (connection->asked)
        return; /* once: a window stays open */
    connection->asked = 1;
    uint8_t queue[] = {RQ_CLEAR, RQ_QUEUE, strlen(settings.queue)};
    uint8_t rest[] = {RQ_MAX, settings.window >> 8, settings.window, RQ_PRIORITY, RQ_PRIORITY_NORMAL, RQ_CONSUME};
    append(connection, queue, sizeof queue);
    append(connection, settings.queue, strlen(settings.queue));
    append(connection, rest, sizeof rest);
}

static void rq_settle(struct connection *connection, uint32_t id, const uint8_t *payload, size_t length)
{
    uint8_t delivered[] = {RQ_CLEAR, RQ_ID, 0, 0, 0, 0, RQ_DELIVERED};
    write_u32(delivered + 2, id);
    append(connection, delivered, sizeof delivered);
    if (settings.mode->requests) {
        uint8_t reply[] = {RQ_CLEAR, RQ_ID, 0, 0, 0, 0, RQ_PAYLOAD, 0, 0, 0, 0};
        const uint8_t tail = RQ_REPLY;
        write_u32(reply + 2, id);
        write_u32(reply + 7, length);
        append(connection, reply, sizeof reply);
        append(connection, payload, length);
        append(connection, &tail, 1);
    }
}

/* How many bytes follow a command's byte, by its top three bits: a number, or the length of a string. */
static const uint8_t rq_parameter_bytes[8] = {0, 0, 1, 2, 4, 1, 2, 4};

static size_t rq_read(struct connection *connection, const uint8_t *bytes, size_t length)
{
    size_t used = 0, at = 0;
    uint32_t id = 0;
    const uint8_t *payload = NULL;
    size_t payload_length = 0;
    while (at < length) {
        uint8_t command = bytes[at++];
        size_t parameter_length = rq_parameter_bytes[command >> 5];
        if (length - at < parameter_length)
            break;
        uint32_t parameter = 0;
        for (size_t i = 0; i < parameter_length; i++)
            parameter = parameter << 8 | bytes[at + i];
        at += parameter_length;
        if (command >= RQ_QUEUE) {
            if (length - at < parameter)
                break;
            if (command == RQ_PAYLOAD) {
                payload = bytes + at;
                payload_length = parameter;
            }
            at += parameter;
            continue;
        }
        switch (command) {
        case RQ_ID:
            id = parameter;
            continue;
        case RQ_QUEUEID:
        case RQ_NOREPLY:
            continue;
        case RQ_CLEAR:
            payload = NULL;
            continue;
        case RQ_CONSUMING:
        case RQ_PONG:
            break;
        case RQ_PING: {
            const uint8_t pong = RQ_PONG;
            append(connection, &pong, 1);
            break;
        }
        case RQ_REQUEST:
            if (payload == NULL)
                die("rq: a request without a payload");
            arrived(connection, payload, payload_length);
            rq_settle(connection, id, payload, payload_length);
            break;
        case RQ_DELIVERED:
            confirmed(connection, id);
            break;
        case RQ_REPLY:
            if (payload == NULL)
                die("rq: a reply without a payload");
            answered(id, payload, payload_length);
            break;
        default:
            die("rq: command %u with id %u: not what was asked for", command, id);
        }
        used = at; /* a whole frame; one that is cut is read again from its beginning */
    }
    return used;
}

const struct wire rq = {
    .name = "rq",
    .confirms = true,
    .can_request = true,
    .send = rq_send,
    .ask = rq_ask,
    .read = rq_read,
};
