/* AMQP 0-9-1, as RabbitMQ speaks it: a channel for each connection, publisher confirms, a prefetch count, and one
 * acknowledgement a message. The wires differ in the queue that they declare:
 *
 *     amqp             a classic durable queue, persistent messages
 *     amqp-quorum      a quorum queue, persistent messages
 *     amqp-transient   a classic queue that ends with the server, transient messages
 *
 *     frame   type u8, channel u16, length u32, that many bytes, 0xce; all numbers are big endian
 *     method  class u16, method u16, arguments
 *
 * A payload goes into one frame. The server may confirm in any order, and many at once.
 */

#include "loadgen.h"

#include <stdio.h>
#include <string.h>

enum {
    FRAME_METHOD = 1,
    FRAME_HEADER = 2,
    FRAME_BODY = 3,
    FRAME_HEARTBEAT = 8,
    FRAME_END = 0xce,
    FRAME_HEAD_BYTES = 7,
    FRAME_BYTES_MAX = 2 * 1024 * 1024, /* or what the server has */
    METHOD_BYTES_MAX = 1024,
    DURABLE = 2,            /* the bit of queue.declare */
    DELIVERY_MODE = 0x1000, /* the flag of a content header */
};

#define METHOD(class, method) ((uint32_t)(class) << 16 | (method))

enum {
    CONNECTION_START = METHOD(10, 10),
    CONNECTION_START_OK = METHOD(10, 11),
    CONNECTION_TUNE = METHOD(10, 30),
    CONNECTION_TUNE_OK = METHOD(10, 31),
    CONNECTION_OPEN = METHOD(10, 40),
    CONNECTION_OPEN_OK = METHOD(10, 41),
    CHANNEL_OPEN = METHOD(20, 10),
    CHANNEL_OPEN_OK = METHOD(20, 11),
    CHANNEL_CLOSE = METHOD(20, 40),
    CHANNEL_CLOSE_OK = METHOD(20, 41),
    QUEUE_DECLARE = METHOD(50, 10),
    QUEUE_DECLARE_OK = METHOD(50, 11),
    BASIC_QOS = METHOD(60, 10),
    BASIC_QOS_OK = METHOD(60, 11),
    BASIC_CONSUME = METHOD(60, 20),
    BASIC_CONSUME_OK = METHOD(60, 21),
    BASIC_CANCEL = METHOD(60, 30),
    BASIC_PUBLISH = METHOD(60, 40),
    BASIC_DELIVER = METHOD(60, 60),
    BASIC_ACK = METHOD(60, 80),
    CONFIRM_SELECT = METHOD(85, 10),
    CONFIRM_SELECT_OK = METHOD(85, 11),
};

/* --- writing ------------------------------------------------------------------------------------------ */

struct frame {
    uint8_t bytes[METHOD_BYTES_MAX];
    size_t length;
};

static void put(struct frame *frame, uint64_t value, unsigned width)
{
    while (width--)
        frame->bytes[frame->length++] = value >> 8 * width;
}

static void put_bytes(struct frame *frame, const void *bytes, size_t length)
{
    memcpy(frame->bytes + frame->length, bytes, length);
    frame->length += length;
}

static void put_short_string(struct frame *frame, const char *text)
{
    put(frame, strlen(text), 1);
    put_bytes(frame, text, strlen(text));
}

/* Begins a method; where it began is given, for `end`. */
static size_t begin(struct frame *frame, uint32_t method)
{
    size_t start = frame->length;
    put(frame, FRAME_METHOD, 1);
    put(frame, method < CHANNEL_OPEN ? 0 : 1, 2); /* the connection's own methods go over channel 0 */
    put(frame, 0, 4);
    put(frame, method, 4);
    return start;
}

static void end(struct frame *frame, size_t start)
{
    uint32_t length = frame->length - start - FRAME_HEAD_BYTES;
    for (unsigned i = 0; i < 4; i++)
        frame->bytes[start + 3 + i] = length >> 8 * (3 - i);
    put(frame, FRAME_END, 1);
}

/* --- before the clock runs ---------------------------------------------------------------------------- */

static uint64_t get(const uint8_t *at, unsigned width)
{
    uint64_t value = 0;
    while (width--)
        value = value << 8 | *at++;
    return value;
}

/* What a channel.close or connection.close says, for an error message. */
static void die_of(uint32_t method, const uint8_t *arguments, size_t length)
{
    const char *text = length > 3 ? (const char *)arguments + 3 : "";
    int text_length = length > 3 ? arguments[2] : 0;
    die("amqp: method %u.%u came: %.*s", method >> 16, method & 0xffff, text_length, text);
}

static void hear_exactly(struct connection *connection, uint8_t *bytes, size_t length)
{
    for (size_t got = 0; got < length;)
        got += hear(connection, bytes + got, length - got);
}

/* Says what is in the frame and waits for a method. Of a TUNE: what it returns is how large a frame may be. */
static uint32_t call(struct connection *connection, const struct frame *frame, uint32_t expected)
{
    uint8_t head[FRAME_HEAD_BYTES], rest[8192] = {0};
    uint32_t method;
    say(connection, frame->bytes, frame->length);
    do {
        hear_exactly(connection, head, sizeof head);
        size_t length = get(head + 3, 4) + 1;
        if (length > sizeof rest)
            die("amqp: a frame of %zu bytes outside the run", length);
        hear_exactly(connection, rest, length);
        method = get(rest, 4);
        /* Besides, confirmations may still come for which nobody waits. */
    } while (head[0] == FRAME_HEARTBEAT || (head[0] == FRAME_METHOD && method == BASIC_ACK));
    if (head[0] != FRAME_METHOD || method != expected)
        die_of(method, rest + 4, get(head + 3, 4) - 4);
    return get(rest + 6, 4);
}

/* The channel ends behind everything that was said on it; a connection that just ends takes acknowledgements along, and
 * a quorum queue that has many of them under way those that it was not told of yet. */
static void amqp_goodbye(struct connection *connection)
{
    struct frame frame = {.length = 0};
    size_t start = begin(&frame, CHANNEL_CLOSE);
    put(&frame, 200, 2);
    put_short_string(&frame, "");
    put(&frame, 0, 4);
    end(&frame, start);
    call(connection, &frame, CHANNEL_CLOSE_OK);
}

static void amqp_hello(struct connection *connection)
{
    static const char plain[] = "\0guest\0guest";
    struct frame frame = {.length = 0};
    put_bytes(&frame, "AMQP\0\0\x09\x01", 8);
    call(connection, &frame, CONNECTION_START);

    frame.length = 0;
    size_t start = begin(&frame, CONNECTION_START_OK);
    put(&frame, 0, 4); /* an empty table of properties */
    put_short_string(&frame, "PLAIN");
    put(&frame, sizeof plain - 1, 4);
    put_bytes(&frame, plain, sizeof plain - 1);
    put_short_string(&frame, "en_US");
    end(&frame, start);
    uint32_t frame_bytes_max = call(connection, &frame, CONNECTION_TUNE);
    if (!frame_bytes_max || frame_bytes_max > FRAME_BYTES_MAX)
        frame_bytes_max = FRAME_BYTES_MAX;
    if (settings.size_bytes + FRAME_HEAD_BYTES + 1 > frame_bytes_max)
        die("--size %zu: a payload goes into one frame here, of %u bytes (rabbitmq.conf: frame_max)",
            settings.size_bytes, frame_bytes_max);

    frame.length = 0;
    start = begin(&frame, CONNECTION_TUNE_OK);
    put(&frame, 8, 2); /* channels */
    put(&frame, frame_bytes_max, 4);
    put(&frame, 0, 2); /* no heartbeats */
    end(&frame, start);
    start = begin(&frame, CONNECTION_OPEN);
    put_short_string(&frame, "/");
    put(&frame, 0, 2);
    end(&frame, start);
    call(connection, &frame, CONNECTION_OPEN_OK);

    frame.length = 0;
    start = begin(&frame, CHANNEL_OPEN);
    put(&frame, 0, 1);
    end(&frame, start);
    call(connection, &frame, CHANNEL_OPEN_OK);
}

static bool is_transient(void)
{
    return settings.wire == &amqp_transient;
}

static void declare(struct connection *connection)
{
    static const char quorum[] = "\x0cx-queue-typeS\0\0\0\x06quorum";
    struct frame frame = {.length = 0};
    size_t start = begin(&frame, QUEUE_DECLARE);
    put(&frame, 0, 2);
    put_short_string(&frame, settings.queue);
    put(&frame, is_transient() ? 0 : DURABLE, 1);
    if (settings.wire == &amqp_quorum) {
        put(&frame, sizeof quorum - 1, 4);
        put_bytes(&frame, quorum, sizeof quorum - 1);
    } else {
        put(&frame, 0, 4);
    }
    end(&frame, start);
    call(connection, &frame, QUEUE_DECLARE_OK);
}

static void amqp_greet(struct connection *connection)
{
    struct frame frame = {.length = 0};
    size_t start;
    declare(connection);
    if (!connection->is_producer) {
        start = begin(&frame, BASIC_QOS);
        put(&frame, 0, 4);
        put(&frame, settings.window, 2);
        put(&frame, 0, 1);
        end(&frame, start);
        call(connection, &frame, BASIC_QOS_OK);
    } else if (connection->number_of_tag == NULL) {
        connection->number_of_tag = allocate(settings.messages + 2, sizeof *connection->number_of_tag);
        start = begin(&frame, CONFIRM_SELECT);
        put(&frame, 0, 1);
        end(&frame, start);
        call(connection, &frame, CONFIRM_SELECT_OK);
    }
}

/* --- the run ------------------------------------------------------------------------------------------ */

static struct frame publish; /* all that stands before a payload */

static void amqp_prepare(void)
{
    publish.length = 0;
    size_t start = begin(&publish, BASIC_PUBLISH);
    put(&publish, 0, 2);
    put_short_string(&publish, "");
    put_short_string(&publish, settings.queue);
    put(&publish, 0, 1);
    end(&publish, start);
    put(&publish, FRAME_HEADER, 1);
    put(&publish, 1, 2);
    put(&publish, 15, 4);
    put(&publish, 60, 2);
    put(&publish, 0, 2);
    put(&publish, settings.size_bytes, 8);
    put(&publish, DELIVERY_MODE, 2);
    put(&publish, is_transient() ? 1 : 2, 1);
    put(&publish, FRAME_END, 1);
    put(&publish, FRAME_BODY, 1);
    put(&publish, 1, 2);
    put(&publish, settings.size_bytes, 4);
}

static void amqp_send(struct connection *connection, uint64_t number)
{
    size_t length = publish.length + settings.size_bytes + 1;
    uint8_t *at = room_for(&connection->out, length);
    memcpy(at, publish.bytes, publish.length);
    proof_write(at + publish.length, number);
    at[length - 1] = FRAME_END;
    connection->out.end += length;
    connection->number_of_tag[++connection->tags] = number;
}

static void amqp_ask(struct connection *connection)
{
    struct frame frame = {.length = 0};
    char tag[16];
    snprintf(tag, sizeof tag, "c%u", ++connection->queues_met);
    size_t start = begin(&frame, BASIC_CONSUME);
    put(&frame, 0, 2);
    put_short_string(&frame, settings.queue);
    put_short_string(&frame, tag);
    put(&frame, 0, 1);
    put(&frame, 0, 4);
    end(&frame, start);
    append(connection, frame.bytes, frame.length);
}

static void amqp_leave(struct connection *connection)
{
    struct frame frame = {.length = 0};
    char tag[16];
    snprintf(tag, sizeof tag, "c%u", connection->queues_met);
    size_t start = begin(&frame, BASIC_CANCEL);
    put_short_string(&frame, tag);
    put(&frame, 1, 1); /* no answer */
    end(&frame, start);
    append(connection, frame.bytes, frame.length);
}

static void acknowledge(struct connection *connection)
{
    struct frame frame = {.length = 0};
    size_t start = begin(&frame, BASIC_ACK);
    put(&frame, connection->delivery_tag, 8);
    put(&frame, 0, 1);
    end(&frame, start);
    append(connection, frame.bytes, frame.length);
}

static void confirm_tag(struct connection *connection, uint64_t tag)
{
    uint64_t number = connection->number_of_tag[tag];
    if (number == UINT64_MAX)
        return; /* alone, before the many that it is among */
    connection->number_of_tag[tag] = UINT64_MAX;
    confirmed(connection, number);
}

static void read_confirmation(struct connection *connection, uint64_t tag, bool is_for_all_before)
{
    if (tag > connection->tags)
        die("amqp: a confirmation of tag %llu, which was never sent", (unsigned long long)tag);
    confirm_tag(connection, tag);
    if (!is_for_all_before)
        return;
    while (connection->tags_confirmed < tag)
        confirm_tag(connection, ++connection->tags_confirmed);
}

static void read_method(struct connection *connection, const uint8_t *at, size_t length)
{
    uint32_t method = get(at, 4);
    if (method == BASIC_DELIVER) {
        connection->delivery_tag = get(at + 5 + at[4], 8);
    } else if (method == BASIC_ACK && connection->is_producer) {
        read_confirmation(connection, get(at + 4, 8), at[12] & 1);
    } else if (method != BASIC_CONSUME_OK) {
        die_of(method, at + 4, length - 4);
    }
}

static size_t amqp_read(struct connection *connection, const uint8_t *bytes, size_t length)
{
    size_t used = 0;
    while (length - used >= FRAME_HEAD_BYTES) {
        const uint8_t *at = bytes + used;
        size_t inside = get(at + 3, 4);
        if (length - used < FRAME_HEAD_BYTES + inside + 1)
            break;
        if (at[FRAME_HEAD_BYTES + inside] != FRAME_END)
            die("amqp: a frame of type %u does not end where it says", at[0]);
        if (at[0] == FRAME_METHOD) {
            read_method(connection, at + FRAME_HEAD_BYTES, inside);
        } else if (at[0] == FRAME_BODY) {
            arrived(connection, at + FRAME_HEAD_BYTES, inside);
            acknowledge(connection);
        }
        used += FRAME_HEAD_BYTES + inside + 1;
    }
    return used;
}

#define AMQP_WIRE(symbol, its_name)                                                                                    \
    const struct wire symbol = {                                                                                       \
        .name = its_name,                                                                                              \
        .confirms = true,                                                                                              \
        .settles_within_ms = 500,                                                                                      \
        .prepare = amqp_prepare,                                                                                       \
        .hello = amqp_hello,                                                                                           \
        .greet = amqp_greet,                                                                                           \
        .goodbye = amqp_goodbye,                                                                                       \
        .leave = amqp_leave,                                                                                           \
        .send = amqp_send,                                                                                             \
        .ask = amqp_ask,                                                                                               \
        .read = amqp_read,                                                                                             \
    }

AMQP_WIRE(amqp, "amqp");
AMQP_WIRE(amqp_quorum, "amqp-quorum");
AMQP_WIRE(amqp_transient, "amqp-transient");
