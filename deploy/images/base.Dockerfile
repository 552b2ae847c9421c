# A stand-in for the official Python image if no registry is reachable: Debian's minimal system and its Python 3.11.
FROM scratch
ADD root.tar /
# Debian removes old versions, so nothing is pinned. Like the official image, it has Python's headers but no compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates netbase python3-pip python3.11 tzdata \
    && apt-get download libpython3.11-dev \
    && dpkg-deb --extract libpython3.11-dev_*.deb headers && cp --recursive headers/usr/include /usr/ \
    && rm -r headers libpython3.11-dev_*.deb /usr/lib/python3.11/EXTERNALLY-MANAGED /var/lib/apt/lists/* \
    && ln --symbolic /usr/bin/python3.11 /usr/local/bin/python
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
CMD ["python"]
