/* One connection: its buffers, its beginning and its end, and conversations before the clock runs. */

#include "loadgen.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { PATIENCE_SECONDS = 10 }; /* for what is done outside the loop */

/* --- buffers ------------------------------------------------------------------------------------------ */

uint8_t *room_for(struct buffer *buffer, size_t length)
{
    if (buffer->capacity - buffer->end >= length)
        return buffer->bytes + buffer->end;
    if (buffer->start) {
        memmove(buffer->bytes, buffer->bytes + buffer->start, buffer->end - buffer->start);
        buffer->end -= buffer->start;
        buffer->start = 0;
    }
    if (buffer->capacity - buffer->end < length) {
        buffer->capacity = 2 * (buffer->end + length);
        buffer->bytes = realloc(buffer->bytes, buffer->capacity);
        if (buffer->bytes == NULL)
            die("no memory for a buffer of %zu bytes", buffer->capacity);
    }
    return buffer->bytes + buffer->end;
}

void append(struct connection *connection, const void *bytes, size_t length)
{
    memcpy(room_for(&connection->out, length), bytes, length);
    connection->out.end += length;
}

void append_text(struct connection *connection, const char *format, ...)
{
    char text[2048];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof text)
        die("a command of %d bytes: use a shorter --queue", length);
    append(connection, text, length);
}

/* --- conversations ------------------------------------------------------------------------------------ */

const char *side(const struct connection *connection)
{
    return connection->is_producer ? "producer" : "consumer";
}

void say(struct connection *connection, const void *bytes, size_t length)
{
    if (send(connection->fd, bytes, length, MSG_NOSIGNAL) != (ssize_t)length)
        die("%s %u: %s", side(connection), connection->number, strerror(errno));
}

size_t hear(struct connection *connection, void *bytes, size_t length_max)
{
    ssize_t got = recv(connection->fd, bytes, length_max, 0);
    if (got <= 0)
        die("%s %u: no answer: %s", side(connection), connection->number,
            got ? strerror(errno) : "the server has closed the connection");
    return got;
}

const char *converse(struct connection *connection, const char *text)
{
    static char line[512];
    size_t length = 0;
    say(connection, text, strlen(text));
    do {
        length += hear(connection, line + length, sizeof line - 1 - length);
        line[length] = 0;
    } while (!strchr(line, '\n') && length < sizeof line - 1);
    return line;
}

void expect(struct connection *connection, const char *text, const char *answer)
{
    const char *line = converse(connection, text);
    if (strncmp(line, answer, strlen(answer)))
        die("%s %u: '%s' was answered by '%s'", side(connection), connection->number, text, line);
}

void block(struct connection *connection, bool is_blocking)
{
    int flags = fcntl(connection->fd, F_GETFL);
    fcntl(connection->fd, F_SETFL, is_blocking ? flags & ~O_NONBLOCK : flags | O_NONBLOCK);
}

/* --- beginning and end ------------------------------------------------------------------------------ */

void open_connection(struct connection *connection, unsigned number, bool is_producer, int epoll)
{
    memset(connection, 0, sizeof *connection);
    connection->epoll = epoll;
    connection->number = number;
    connection->is_producer = is_producer;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    int wrong = getaddrinfo(settings.host, settings.port, &hints, &found);
    if (wrong)
        die("%s:%s: %s", settings.host, settings.port, gai_strerror(wrong));
    connection->fd = socket(found->ai_family, found->ai_socktype, found->ai_protocol);
    if (connection->fd < 0 || connect(connection->fd, found->ai_addr, found->ai_addrlen))
        die("%s:%s: %s", settings.host, settings.port, strerror(errno));
    freeaddrinfo(found);
    int on = 1;
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    struct timeval patience = {.tv_sec = PATIENCE_SECONDS};
    setsockopt(connection->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(connection->fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (settings.wire->hello)
        settings.wire->hello(connection);
    if (settings.wire->greet && !settings.mode->idles)
        settings.wire->greet(connection);
    block(connection, false);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connection};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, connection->fd, &event))
        die("epoll: %s", strerror(errno));
}

void flush(struct connection *connection)
{
    struct buffer *out = &connection->out;
    while (out->end > out->start) {
        ssize_t written = send(connection->fd, out->bytes + out->start, out->end - out->start, MSG_NOSIGNAL);
        if (written < 0 && errno == EAGAIN)
            break;
        if (written < 0)
            die("%s %u: %s", side(connection), connection->number, strerror(errno));
        out->start += written;
    }
    bool wants_room = out->end > out->start;
    if (!wants_room)
        out->start = out->end = 0;
    if (wants_room != connection->wants_room) {
        connection->wants_room = wants_room;
        struct epoll_event event = {.events = EPOLLIN | (wants_room ? EPOLLOUT : 0), .data.ptr = connection};
        epoll_ctl(connection->epoll, EPOLL_CTL_MOD, connection->fd, &event);
    }
}

void part_with(struct connection *connection)
{
    block(connection, true);
    flush(connection);
    if (connection->out.end > connection->out.start)
        die("%s %u: the server does not read", side(connection), connection->number);
    if (settings.wire->goodbye)
        settings.wire->goodbye(connection);
    shutdown(connection->fd, SHUT_WR);
    uint8_t rest[4096];
    ssize_t got;
    do
        got = recv(connection->fd, rest, sizeof rest, 0);
    while (got > 0);
    if (got < 0 && errno != ECONNRESET)
        die("%s %u: the server did not end the connection: %s", side(connection), connection->number,
            strerror(errno));
    close(connection->fd);
    free(connection->in.bytes);
    free(connection->out.bytes);
    free(connection->ids.bytes);
    free(connection->number_of_tag);
}
