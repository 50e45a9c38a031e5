/* NATS JetStream: a publish with an answer for each message, a durable pull consumer, one +ACK a message.
 *
 * The queue is a subject. Its stream is called by what stands before the first dot and takes everything below that
 * name, so that queues of one run share a stream, which is the cheaper way for the server. Messages stay in it when
 * they are acknowledged, which is cheaper than a work queue. A consumer asks for as many as its window has room for,
 * when half of it is free. The server does not answer acknowledgements; it is asked for what is left when the run is
 * over.
 */

#include "loadgen.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LINE_BYTES_MAX = 1024, ANSWER_BYTES_MAX = 8192 };

static char stream[256], consumer[256], publish_head[512];
static int publish_head_length;

static void nats_prepare(void)
{
    const char *queue = settings.queue;
    snprintf(stream, sizeof stream, "%.*s", (int)strcspn(queue, "."), queue);
    snprintf(consumer, sizeof consumer, "%s", queue);
    for (char *at = consumer; *at; at++)
        if (*at == '.')
            *at = '-';
    publish_head_length = snprintf(publish_head, sizeof publish_head, "PUB %s _P.%d.", queue, (int)getpid());
}

/* --- before the clock runs ---------------------------------------------------------------------------- */

/* Where answers to a connection go: _P.process.number.* for producers, _C.process.number.* for consumers. */
static char inbox(const struct connection *connection)
{
    return connection->is_producer ? 'P' : 'C';
}

static void nats_hello(struct connection *connection)
{
    char text[LINE_BYTES_MAX];
    char heard[ANSWER_BYTES_MAX];
    size_t length = 0;
    snprintf(text, sizeof text,
             "CONNECT {\"verbose\":false,\"pedantic\":false,\"headers\":true,\"no_responders\":true,"
             "\"lang\":\"c\",\"version\":\"1\",\"protocol\":1}\r\nSUB _%c.%d.%u.* 1\r\nPING\r\n",
             inbox(connection), (int)getpid(), connection->number);
    say(connection, text, strlen(text));
    do {
        length += hear(connection, heard + length, sizeof heard - 1 - length);
        heard[length] = 0;
        if (strstr(heard, "-ERR"))
            die("nats: %s", heard);
    } while (!strstr(heard, "PONG\r\n"));
}

/* Asks the server's API and waits for the answer, which lasts until the next call. */
static const char *request(struct connection *connection, const char *subject, const char *json)
{
    static char heard[ANSWER_BYTES_MAX];
    char text[2 * LINE_BYTES_MAX];
    size_t length = 0;
    snprintf(text, sizeof text, "PUB %s _%c.%d.%u.api %zu\r\n%s\r\n", subject, inbox(connection), (int)getpid(),
             connection->number, strlen(json), json);
    say(connection, text, strlen(text));
    while (true) {
        length += hear(connection, heard + length, sizeof heard - 1 - length);
        heard[length] = 0;
        char *line_end;
        while ((line_end = strstr(heard, "\r\n")) != NULL) { /* what a server says unasked, at any moment */
            if (!strncmp(heard, "PING", 4))
                say(connection, "PONG\r\n", 6);
            else if (strncmp(heard, "INFO ", 5))
                break;
            length -= line_end + 2 - heard;
            memmove(heard, line_end + 2, length + 1);
        }
        if (line_end == NULL)
            continue;
        if (strncmp(heard, "MSG _", 5))
            die("nats: %s was answered by %s", subject, heard);
        char *last = line_end;
        while (last[-1] != ' ')
            last--;
        if (heard + length >= line_end + 2 + strtoul(last, NULL, 10) + 2)
            return line_end + 2;
    }
}

static void request_done(struct connection *connection, const char *subject, const char *json)
{
    const char *answer = request(connection, subject, json);
    if (strstr(answer, "\"error\""))
        die("nats: %s was answered by %s", subject, answer);
}

static void nats_greet(struct connection *connection)
{
    char subject[LINE_BYTES_MAX], json[LINE_BYTES_MAX];
    if (connection->number > 0)
        return;
    if (!connection->queues_met++) { /* one stream for all queues of the run */
        snprintf(subject, sizeof subject, "$JS.API.STREAM.CREATE.%s", stream);
        snprintf(json, sizeof json,
                 "{\"name\":\"%s\",\"subjects\":[\"%s\",\"%s.>\"],\"retention\":\"limits\",\"storage\":\"file\","
                 "\"num_replicas\":1,\"max_consumers\":1000000}",
                 stream, stream, stream);
        request_done(connection, subject, json);
    }
    if (connection->is_producer)
        return;
    snprintf(subject, sizeof subject, "$JS.API.CONSUMER.DURABLE.CREATE.%s.%s", stream, consumer);
    snprintf(json, sizeof json,
             "{\"stream_name\":\"%s\",\"config\":{\"durable_name\":\"%s\",\"filter_subject\":\"%s\","
             "\"ack_policy\":\"explicit\",\"deliver_policy\":\"all\",\"max_ack_pending\":%u}}",
             stream, consumer, settings.queue, 2 * settings.window * settings.consumers);
    request_done(connection, subject, json);
}

static bool nats_is_settled(struct connection *connection)
{
    char subject[LINE_BYTES_MAX];
    snprintf(subject, sizeof subject, "$JS.API.CONSUMER.INFO.%s.%s", stream, consumer);
    const char *answer = request(connection, subject, "");
    return strstr(answer, "\"num_ack_pending\":0,") && strstr(answer, "\"num_pending\":0");
}

/* --- the run ------------------------------------------------------------------------------------------ */

static void nats_send(struct connection *connection, uint64_t number)
{
    char rest[64];
    int rest_length = snprintf(rest, sizeof rest, "%u.%llu %zu\r\n", connection->number, (unsigned long long)number,
                               settings.size_bytes);
    size_t length = publish_head_length + rest_length + settings.size_bytes + 2;
    uint8_t *at = room_for(&connection->out, length);
    memcpy(at, publish_head, publish_head_length);
    memcpy(at + publish_head_length, rest, rest_length);
    proof_write(at + publish_head_length + rest_length, number);
    memcpy(at + length - 2, "\r\n", 2);
    connection->out.end += length;
}

static void nats_ask(struct connection *connection)
{
    char json[64];
    unsigned count = 0;
    if (connection->asked > settings.window / 2)
        return;
    while (connection->asked < settings.window && may_ask()) {
        connection->asked++;
        count++;
    }
    if (!count)
        return;
    int length = snprintf(json, sizeof json, "{\"batch\":%u}", count);
    append_text(connection, "PUB $JS.API.CONSUMER.MSG.NEXT.%s.%s _%c.%d.%u.m %d\r\n%s\r\n", stream, consumer,
                inbox(connection), (int)getpid(), connection->number, length, json);
}

/* MSG subject sid [reply] length. The words of the line, as places in it. */
static unsigned split(const char *line, size_t length, const char *words[], unsigned words_max)
{
    unsigned count = 0;
    for (size_t i = 0; i < length && count < words_max; i++)
        if (i == 0 || line[i - 1] == ' ')
            words[count++] = line + i;
    return count;
}

static void read_answer(struct connection *connection, const char *subject, const char *payload, size_t length)
{
    const char *number = memchr(subject, ' ', 64);
    if (memmem(payload, length, "\"error\"", 7) || number == NULL)
        die("nats: a publish was answered by %.*s", (int)length, payload);
    while (number[-1] != '.')
        number--;
    confirmed(connection, strtoull(number, NULL, 10));
}

static size_t nats_read(struct connection *connection, const uint8_t *bytes, size_t length)
{
    size_t used = 0;
    const uint8_t *line_end;
    while (used < length && (line_end = memchr(bytes + used, '\n', length - used))) {
        const char *line = (const char *)bytes + used;
        size_t line_length = line_end + 1 - (bytes + used);
        if (!strncmp(line, "PING", 4)) {
            append(connection, "PONG\r\n", 6);
        } else if (!strncmp(line, "MSG ", 4)) {
            const char *words[5];
            unsigned count = split(line, line_length, words, 5);
            size_t payload_length = strtoull(words[count - 1], NULL, 10);
            if (length - used - line_length < payload_length + 2)
                break;
            if (connection->is_producer) {
                read_answer(connection, words[1], line + line_length, payload_length);
            } else if (count < 5) {
                die("nats: '%.*s' is no message", (int)line_length - 2, line);
            } else {
                arrived(connection, bytes + used + line_length, payload_length);
                append(connection, "PUB ", 4);
                append(connection, words[3], words[4] - words[3]);
                append(connection, "4\r\n+ACK\r\n", 9);
                connection->asked--;
            }
            line_length += payload_length + 2;
        } else if (strncmp(line, "PONG", 4) && strncmp(line, "INFO", 4)) {
            die("nats: '%.*s'", (int)line_length - 2, line);
        }
        used += line_length;
    }
    if (!connection->is_producer)
        nats_ask(connection);
    return used;
}

const struct wire nats = {
    .name = "nats",
    .confirms = true,
    .prepare = nats_prepare,
    .hello = nats_hello,
    .greet = nats_greet,
    .send = nats_send,
    .ask = nats_ask,
    .read = nats_read,
    .is_settled = nats_is_settled,
};
