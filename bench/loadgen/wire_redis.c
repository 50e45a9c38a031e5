/* Redis, in the two ways in which it keeps a message until its consumer is done with it.
 *
 *     redis-streams   XADD; a group that reads with XREADGROUP COUNT window; one XACK a message, or one
 *                     for each answer of XREADGROUP with --acks together. One XREADGROUP at a time, behind
 *                     the acknowledgements of the last one, so never more than a window is pending.
 *                     Entries stay in the stream (no XDEL), which is the cheaper way for Redis.
 *     redis-lists     LPUSH; BLMOVE to a list of messages being worked on; LREM from there. As many are
 *                     asked for at a time as fit into the window.
 *
 * Answers are read token by token: the order in which they come is known.
 */

#include "loadgen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEAD_BYTES_MAX = 1024 };

struct constant {
    char bytes[HEAD_BYTES_MAX];
    int length;
};

static struct constant add_head, ack_words, read_words, move_command, remove_head;

static void set(struct constant *constant, int length)
{
    if (length >= HEAD_BYTES_MAX)
        die("--queue '%s': too long", settings.queue);
    constant->length = length;
}

/* A token: its kind is its first byte, `number` what stands there, `text` what a '$' brings. */
struct token {
    char kind;
    long number;
    const uint8_t *text;
};

/* How many bytes the token has; 0 where it is not there as a whole. */
static size_t read_token(const uint8_t *bytes, size_t length, struct token *token)
{
    const uint8_t *end = memchr(bytes, '\n', length);
    if (end == NULL)
        return 0;
    size_t used = end + 1 - bytes;
    token->kind = bytes[0];
    if (token->kind != ':' && token->kind != '$' && token->kind != '*')
        die("redis: '%.*s'", (int)used - 2, (const char *)bytes);
    token->number = strtol((const char *)bytes + 1, NULL, 10);
    if (token->kind != '$')
        return used;
    if (token->number < 0)
        die("redis: nothing, where a message was asked for");
    if (length - used < (size_t)token->number + 2)
        return 0;
    token->text = bytes + used;
    return used + token->number + 2;
}

static void send_payload(struct connection *connection, const struct constant *head, uint64_t number)
{
    size_t length = head->length + settings.size_bytes + 2;
    uint8_t *at = room_for(&connection->out, length);
    memcpy(at, head->bytes, head->length);
    proof_write(at + head->length, number);
    memcpy(at + length - 2, "\r\n", 2);
    connection->out.end += length;
}

/* --- streams ---------------------------------------------------------------------------------------- */

static void streams_prepare(void)
{
    const char *queue = settings.queue;
    size_t length = strlen(queue);
    set(&add_head, snprintf(add_head.bytes, HEAD_BYTES_MAX,
                            "*5\r\n$4\r\nXADD\r\n$%zu\r\n%s\r\n$1\r\n*\r\n$1\r\nv\r\n$%zu\r\n", length, queue,
                            settings.size_bytes));
    set(&ack_words, snprintf(ack_words.bytes, HEAD_BYTES_MAX, "$4\r\nXACK\r\n$%zu\r\n%s\r\n$1\r\ng\r\n", length, queue));
    set(&read_words,
        snprintf(read_words.bytes, HEAD_BYTES_MAX,
                 "$5\r\nCOUNT\r\n$%d\r\n%u\r\n$5\r\nBLOCK\r\n$1\r\n0\r\n$7\r\nSTREAMS\r\n$%zu\r\n%s\r\n$1\r\n>\r\n",
                 snprintf(NULL, 0, "%u", settings.window), settings.window, length, queue));
}

static void streams_greet(struct connection *connection)
{
    if (connection->is_producer || connection->number > 0)
        return;
    char text[HEAD_BYTES_MAX];
    snprintf(text, sizeof text, "XGROUP CREATE %s g 0 MKSTREAM\r\n", settings.queue);
    const char *answer = converse(connection, text);
    if (strncmp(answer, "+OK", 3) && strncmp(answer, "-BUSYGROUP", 10))
        die("redis: %s", answer);
}

static void streams_send(struct connection *connection, uint64_t number)
{
    send_payload(connection, &add_head, number);
}

static void streams_ask(struct connection *connection)
{
    if (connection->asked || !is_more_to_come())
        return;
    connection->asked = 1;
    append_text(connection, "*11\r\n$10\r\nXREADGROUP\r\n$5\r\nGROUP\r\n$1\r\ng\r\n$%d\r\nc%u\r\n",
                snprintf(NULL, 0, "c%u", connection->number), connection->number);
    append(connection, read_words.bytes, read_words.length);
}

static void streams_acknowledge(struct connection *connection)
{
    append_text(connection, "*%u\r\n", 3 + connection->ids_count);
    append(connection, ack_words.bytes, ack_words.length);
    append(connection, connection->ids.bytes, connection->ids.end);
    connection->ids.end = 0;
    connection->ids_count = 0;
}

/* An answer of XREADGROUP, from its first token to its last; the entries' five come again and again. */
enum {
    PLACE_STREAMS, /* here an acknowledgement may be answered instead */
    PLACE_STREAM,
    PLACE_NAME,
    PLACE_ENTRIES,
    PLACE_ENTRY,
    PLACE_ID,
    PLACE_FIELDS,
    PLACE_FIELD,
    PLACE_VALUE,
};
static const char kinds[] = {'*', '*', '$', '*', '*', '$', '*', '$', '$'};

static size_t streams_read(struct connection *connection, const uint8_t *bytes, size_t length)
{
    size_t used = 0, token_length;
    struct token token;
    while (used < length && (token_length = read_token(bytes + used, length - used, &token))) {
        const uint8_t *at = bytes + used;
        used += token_length;
        if (connection->is_producer) {
            confirmed_next(connection);
            continue;
        }
        if (connection->place == PLACE_STREAMS && token.kind == ':') {
            acknowledged(token.number);
            continue;
        }
        if (token.kind != kinds[connection->place])
            die("redis: '%c' at place %u of an answer to XREADGROUP", token.kind, connection->place);
        switch (connection->place++) {
        case PLACE_ENTRIES:
            connection->entries_left = token.number;
            break;
        case PLACE_ID:
            memcpy(room_for(&connection->ids, token_length), at, token_length);
            connection->ids.end += token_length;
            connection->ids_count++;
            break;
        case PLACE_VALUE:
            arrived(connection, token.text, token.number);
            connection->entries_left--;
            connection->place = connection->entries_left ? PLACE_ENTRY : PLACE_STREAMS;
            if (!settings.acks_together || !connection->entries_left)
                streams_acknowledge(connection);
            if (!connection->entries_left) {
                connection->asked = 0;
                streams_ask(connection);
            }
            break;
        }
    }
    return used;
}

const struct wire redis_streams = {
    .name = "redis-streams",
    .confirms = true,
    .answers_acks = true,
    .prepare = streams_prepare,
    .greet = streams_greet,
    .send = streams_send,
    .ask = streams_ask,
    .read = streams_read,
};

/* --- lists ------------------------------------------------------------------------------------------ */

static void lists_prepare(void)
{
    const char *queue = settings.queue;
    size_t length = strlen(queue);
    set(&add_head, snprintf(add_head.bytes, HEAD_BYTES_MAX, "*3\r\n$5\r\nLPUSH\r\n$%zu\r\n%s\r\n$%zu\r\n", length, queue,
                            settings.size_bytes));
    set(&move_command,
        snprintf(move_command.bytes, HEAD_BYTES_MAX,
                 "*6\r\n$6\r\nBLMOVE\r\n$%zu\r\n%s\r\n$%zu\r\n%s.work\r\n$5\r\nRIGHT\r\n$4\r\nLEFT\r\n$1\r\n0\r\n", length,
                 queue, length + 5, queue));
    set(&remove_head, snprintf(remove_head.bytes, HEAD_BYTES_MAX,
                               "*4\r\n$4\r\nLREM\r\n$%zu\r\n%s.work\r\n$2\r\n-1\r\n$%zu\r\n", length + 5, queue,
                               settings.size_bytes));
}

static void lists_send(struct connection *connection, uint64_t number)
{
    send_payload(connection, &add_head, number);
}

static void lists_ask(struct connection *connection)
{
    while (connection->asked + connection->unacknowledged < settings.window && may_ask()) {
        append(connection, move_command.bytes, move_command.length);
        connection->asked++;
    }
}

static size_t lists_read(struct connection *connection, const uint8_t *bytes, size_t length)
{
    size_t used = 0, token_length;
    struct token token;
    while (used < length && (token_length = read_token(bytes + used, length - used, &token))) {
        used += token_length;
        if (connection->is_producer) {
            confirmed_next(connection);
        } else if (token.kind == '$') {
            arrived(connection, token.text, token.number);
            append(connection, remove_head.bytes, remove_head.length);
            append(connection, token.text, token.number + 2);
            connection->asked--;
            connection->unacknowledged++;
        } else {
            acknowledged(token.number);
            connection->unacknowledged--;
        }
    }
    if (!connection->is_producer)
        lists_ask(connection);
    return used;
}

const struct wire redis_lists = {
    .name = "redis-lists",
    .confirms = true,
    .answers_acks = true,
    .prepare = lists_prepare,
    .send = lists_send,
    .ask = lists_ask,
    .read = lists_read,
};
