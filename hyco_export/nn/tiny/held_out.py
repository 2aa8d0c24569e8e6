"""Subjects of the standard library that the tiny family is never trained on.

The validation prompts ask about these names only. No dialogue of the training corpus asks about them.
"""

HELD_OUT_SUBJECTS: frozenset[str] = frozenset(
    """
    ast.literal_eval asyncio.Queue.put asyncio.wait_for base64.b64encode bisect.insort_right bz2.compress
    calendar.monthrange cmd.Cmd.onecmd collections.Counter.most_common collections.OrderedDict.move_to_end
    collections.deque.rotate configparser.RawConfigParser.read contextlib.closing copy.deepcopy csv.Sniffer.sniff
    dataclasses.replace datetime.timedelta.total_seconds difflib.get_close_matches dis.dis
    email.message.Message.get_payload enum.unique filecmp.cmp fileinput.input fnmatch.filter
    fractions.Fraction.limit_denominator ftplib.FTP.login functools.lru_cache functools.partialmethod glob.glob
    gzip.open hashlib.file_digest heapq.nlargest hmac.new html.escape http.client.HTTPResponse.getheader
    imaplib.IMAP4.search importlib.reload inspect.getsource ipaddress.ip_network itertools.groupby itertools.product
    json.dumps json.load linecache.getline locale.currency logging.Logger.warning
    logging.handlers.RotatingFileHandler mailbox.Mailbox.add math.gcd math.hypot math.isclose mimetypes.guess_type
    multiprocessing.pool.Pool.map numbers.Rational operator.itemgetter os.makedirs os.path.join os.path.splitdrive
    os.walk pathlib.Path.exists pathlib.Path.glob pathlib.PurePath.with_suffix pkgutil.iter_modules platform.machine
    plistlib.load poplib.POP3.stat pprint.pformat profile.run queue.Queue.get_nowait random.Random.choice
    random.Random.sample random.Random.shuffle random.Random.uniform re.split re.sub sched.scheduler.run
    secrets.token_hex shelve.open shlex.quote shutil.copytree shutil.rmtree smtplib.SMTP.sendmail
    socket.create_connection socketserver.TCPServer sorted ssl.create_default_context statistics.median
    statistics.pstdev str.partition str.removeprefix str.zfill string.capwords subprocess.Popen.communicate
    subprocess.run sum symtable.Symbol.is_local tarfile.TarFile.extractall tempfile.TemporaryDirectory
    tempfile.mkdtemp textwrap.dedent textwrap.shorten threading.Event.wait threading.Semaphore time.monotonic
    time.strftime timeit.repeat tokenize.generate_tokens traceback.format_exc turtle.RawTurtle typing.cast
    unittest.TestCase.assertRaises urllib.parse.urljoin urllib.request.urlopen uuid.uuid5 warnings.catch_warnings
    weakref.finalize webbrowser.open xml.dom.minidom.parseString xml.etree.ElementTree.parse
    zipfile.ZipFile.extractall zipfile.is_zipfile
    """.split()
)
