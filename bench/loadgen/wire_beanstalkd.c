/* beanstalkd: put, reserve, delete. A consumer asks for as many jobs at a time as fit into its window;
 * the server answers in order, and waits with the next command until there is a job for the last one. */

#include "loadgen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LINE_BYTES_MAX = 256 };

static const char inserted[] = "INSERTED ", reserved[] = "RESERVED ", deleted[] = "DELETED\r\n";

static char watched[LINE_BYTES_MAX - 16]; /* by the one consumer that moves from queue to queue */

static void beanstalkd_greet(struct connection *connection)
{
    char text[LINE_BYTES_MAX];
    if (connection->is_producer) {
        snprintf(text, sizeof text, "use %s\r\n", settings.queue);
        expect(connection, text, "USING");
    } else {
        snprintf(text, sizeof text, "watch %s\r\n", settings.queue);
        expect(connection, text, "WATCHING 2");
        snprintf(text, sizeof text, "ignore %s\r\n", *watched ? watched : "default");
        expect(connection, text, "WATCHING 1");
        if (settings.mode->moves)
            snprintf(watched, sizeof watched, "%s", settings.queue);
    }
}

static void beanstalkd_send(struct connection *connection, uint64_t number)
{
    append_text(connection, "put 0 0 600 %zu\r\n", settings.size_bytes);
    uint8_t *at = room_for(&connection->out, settings.size_bytes + 2);
    proof_write(at, number);
    memcpy(at + settings.size_bytes, "\r\n", 2);
    connection->out.end += settings.size_bytes + 2;
}

static void beanstalkd_ask(struct connection *connection)
{
    while (connection->asked + connection->unacknowledged < settings.window && may_ask()) {
        append(connection, "reserve\r\n", 9);
        connection->asked++;
    }
}

static bool begins(const uint8_t *line, size_t line_length, const char *with)
{
    size_t length = strlen(with);
    return line_length >= length && !memcmp(line, with, length);
}

static size_t beanstalkd_read(struct connection *connection, const uint8_t *bytes, size_t length)
{
    size_t used = 0;
    const uint8_t *line_end;
    while (used < length && (line_end = memchr(bytes + used, '\n', length - used))) {
        const uint8_t *line = bytes + used;
        size_t line_length = line_end + 1 - line;
        if (begins(line, line_length, inserted)) {
            confirmed_next(connection);
        } else if (begins(line, line_length, deleted)) {
            acknowledged(1);
            connection->unacknowledged--;
        } else if (begins(line, line_length, reserved)) {
            char *after_id;
            strtoull((const char *)line + strlen(reserved), &after_id, 10);
            size_t payload_length = strtoull(after_id, NULL, 10);
            if (length - used - line_length < payload_length + 2)
                break;
            arrived(connection, line + line_length, payload_length);
            append_text(connection, "delete %.*s\r\n", (int)(after_id - (char *)line) - (int)strlen(reserved),
                        (const char *)line + strlen(reserved));
            connection->asked--;
            connection->unacknowledged++;
            line_length += payload_length + 2;
        } else {
            die("beanstalkd: '%.*s'", (int)line_length - 2, (const char *)line);
        }
        used += line_length;
    }
    if (!connection->is_producer)
        beanstalkd_ask(connection);
    return used;
}

const struct wire beanstalkd = {
    .name = "beanstalkd",
    .confirms = true,
    .answers_acks = true,
    .greet = beanstalkd_greet,
    .send = beanstalkd_send,
    .ask = beanstalkd_ask,
    .read = beanstalkd_read,
};
